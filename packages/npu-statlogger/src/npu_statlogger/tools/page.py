"""The HTML page of a report: one file, no script, nothing from elsewhere, light or dark as the reader's system."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from npu_statlogger.tools.svg import draw
from npu_statlogger.tools.text import clock

if TYPE_CHECKING:
    from npu_statlogger.tools.notes import Finding
    from npu_statlogger.tools.svg import Plot

__all__ = ["Section", "page"]

Section = tuple[str, Sequence[str], Sequence[Sequence[str]]]
"""A table: its title, its heads, its rows; all but the first column are flush right."""

_STYLE = """
:root { color-scheme: light dark; --ink:#1c2430; --soft:#66717f; --line:#e3e7ec; --page:#f6f7f9; --card:#fff;
  --warn:#b45309; --warnback:#fff7e8; --mark:#f59e0b;
  --c0:#2563c9; --c1:#d97706; --c2:#b4235a; --c3:#0f8a74; --c4:#7c4dd6; --c5:#5b6b7d; --c6:#8a6d1a; --c7:#1f8fb5; }
@media (prefers-color-scheme: dark) { :root { --ink:#e5e9ef; --soft:#98a4b3; --line:#2c343f; --page:#12161c;
  --card:#1a2029; --warn:#fbbf55; --warnback:#2b2415; --mark:#f59e0b;
  --c0:#6aa3ff; --c1:#f5a742; --c2:#f2749f; --c3:#3fc9ae; --c4:#b295f5; --c5:#9fb0c3; --c6:#d6b656; --c7:#5cc6ea; } }
* { box-sizing:border-box } body { margin:0; background:var(--page); color:var(--ink);
  font:14px/1.5 system-ui, "Segoe UI", "Liberation Sans", "DejaVu Sans", sans-serif; }
main { max-width:1240px; margin:0 auto; padding:28px 20px 48px } h1 { font-size:22px; margin:0 0 2px; font-weight:650 }
h2 { font-size:15px; margin:30px 0 10px; font-weight:650 } .soft { color:var(--soft) } p { margin:0 }
.cards { display:grid; grid-template-columns:repeat(auto-fill, minmax(168px, 1fr)); gap:10px; margin-top:18px }
.card { background:var(--card); border:1px solid var(--line); border-radius:8px; padding:10px 14px }
.card b { display:block; font-size:21px; font-weight:650; font-variant-numeric:tabular-nums; line-height:1.3 }
.card span { color:var(--soft); font-size:12.5px } .card i { font-style:normal; color:var(--soft); font-size:12px }
ul.notes { list-style:none; margin:0; padding:0; background:var(--warnback); border:1px solid var(--line);
  border-left:3px solid var(--mark); border-radius:8px } .notes li { padding:7px 14px; display:flex; gap:14px }
.notes li + li { border-top:1px solid var(--line) } .notes time { color:var(--soft); white-space:nowrap;
  font-variant-numeric:tabular-nums } .plots { display:grid; gap:12px;
  grid-template-columns:repeat(auto-fill, minmax(min(100%, 540px), 1fr)) }
figure { margin:0; background:var(--card); border:1px solid var(--line); border-radius:8px; padding:10px 12px 6px }
figcaption { display:flex; flex-wrap:wrap; gap:4px 14px; font-weight:600; font-size:13.5px; margin:0 0 4px 2px }
figcaption span { font-weight:400; color:var(--soft); font-size:12.5px } figcaption span::before { content:"";
  display:inline-block; width:12px; height:3px; border-radius:2px; background:var(--key); vertical-align:middle;
  margin-right:5px } svg { width:100%; height:auto; display:block } svg text { fill:var(--soft); font-size:11px }
svg .grid { stroke:var(--line) } svg .axis { stroke:var(--soft) } svg .mark { fill:var(--mark); opacity:.22 }
svg .hover { fill:var(--ink); opacity:0 } svg .hover:hover { opacity:.12 }
.scroll { overflow-x:auto; background:var(--card); border:1px solid var(--line); border-radius:8px }
table { border-collapse:collapse; width:100%; font-variant-numeric:tabular-nums } th { color:var(--soft);
  font-weight:500; font-size:12.5px } td, th { padding:5px 14px; text-align:right; white-space:nowrap }
td:first-child, th:first-child { text-align:left } tbody tr { border-top:1px solid var(--line) }
footer { margin-top:26px; color:var(--soft); font-size:12.5px }
"""


def page(
    title: str,
    origin: Sequence[str],
    cards: Sequence[tuple[str, str, str]],
    findings: Sequence[Finding],
    plots: Sequence[Plot],
    tables: Sequence[Section],
    footer: str,
) -> str:
    """Return the page. `cards` are a label, a figure, and what stands below it; all text is escaped here."""
    parts = [
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>',
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style><main><h1>{escape(title)}</h1>',
        *(f'<p class="soft">{escape(line)}</p>' for line in origin),
        '<div class="cards">',
        *(_card(*card) for card in cards),
        "</div>",
        *_notes(findings),
        '<h2>Over time</h2><div class="plots">' if plots else "",
        *(_figure(plot) for plot in plots),
        "</div>" if plots else "",
        *(_table(*section) for section in tables),
        f"<footer>{escape(footer)}</footer></main></html>",
    ]
    return "\n".join(part for part in parts if part) + "\n"


def _card(label: str, figure: str, below: str) -> str:
    more = f"<br><i>{escape(below)}</i>" if below else ""
    return f'<div class="card"><b>{escape(figure)}</b><span>{escape(label)}</span>{more}</div>'


def _notes(findings: Sequence[Finding]) -> list[str]:
    if not findings:
        return []
    rows = [f"<li><time>{clock(each.start)}</time><span>{escape(each.text)}</span></li>" for each in findings]
    return ['<h2>Out of the ordinary</h2><ul class="notes">', *rows, "</ul>"]


def _figure(plot: Plot) -> str:
    shown = plot.curves if len(plot.curves) > 1 else ()
    keys = [f'<span style="--key:var(--c{curve.color})">{escape(curve.label)}</span>' for curve in shown]
    return f"<figure><figcaption>{escape(plot.title)} {''.join(keys)}</figcaption>{draw(plot)}</figure>"


def _table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in heads)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return (
        f'<h2>{escape(title)}</h2><div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )
