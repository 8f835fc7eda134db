# noqa: INP001 (a script of the build)
"""Owns the check of what the compiler made of each tier; the build runs it before it links.

An inline function that two tiers compile is one weak symbol, of which the linker keeps any: compiled with wide
instructions, it would end a process on a processor without them. So a tier defines symbols of its own namespace only,
and its code holds no instruction that it does not ask the processor for.

Usage: check_tiers.py [--nm NM] [--objdump OBJDUMP] TIER:INSTRUCTIONS=OBJECT,OBJECT... where INSTRUCTIONS are those that
the tier asks for, with commas between, and TIER is `baseline` for what is no tier's.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys

# What a disassembly must not hold without these, as patterns that begin with a literal, to be quick in a million lines.
_SIGNS = {
    "avx2": (r":\tv",),  # all names of AVX begin with v
    "avxvnni": (r"\{vex\} vpdp",),
    "avx512f": (r"%zmm", r"%k[0-7]", r"mm(?:1[6-9]|2\d|3[01])\b"),
    "avx512vbmi": (r"\tvpermb", r"\tvperm[it]2b", r"\tvpmultishiftqb"),
    "avx512bf16": (r"\tvdpbf16", r"\tvcvtne"),
    "avx512fp16": (r"\tvfmadd\d+[ps]h", r"\tvfnmadd\d+[ps]h", r"\tvmulph", r"\tvaddph"),
    "amx_tile": (r"%tmm", r"\tldtilecfg", r"\ttilerelease"),
    "amx_fp16": (r"\ttdpfp16",),
}
# a pointer to a function of the C++ runtime, no code
_HARMLESS = "DW.ref."


def main(arguments: list[str]) -> str | None:
    """Return what is wrong, or None."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nm", default="nm")
    parser.add_argument("--objdump", default="objdump")
    parser.add_argument("tiers", nargs="+")
    options = parser.parse_args(arguments)
    found = []
    for argument in options.tiers:
        tier, objects = argument.split("=", 1)
        tier, _, instructions = tier.partition(":")
        found += wide_instructions(tier, instructions.split(","), objects.split(","), options.objdump)
        if tier != "baseline":
            found += foreign_symbols(tier, objects.split(","), options.nm)
    return "\n".join(found) or None


def foreign_symbols(tier: str, objects: list[str], nm: str) -> list[str]:
    """Name what the objects of a tier define for others to see outside the tier's namespace."""
    listing = _output(nm, "-C", "--defined-only", "--extern-only", *objects)
    names = (line.split(maxsplit=2) for line in listing.splitlines() if line and not line.endswith(":"))
    foreign = {name for *_, name in names if not name.startswith((f"npu_ops::{tier}::", _HARMLESS))}
    return [f"{tier}: {name} is no symbol of npu_ops::{tier}: make it always_inline, or local." for name in foreign]


def wide_instructions(tier: str, instructions: list[str], objects: list[str], objdump: str) -> list[str]:
    """Name the first instruction of each kind that the tier does not ask for."""
    signs = [sign for each, its in _SIGNS.items() if each not in instructions for sign in its]
    listing = _output(objdump, "-d", "--no-show-raw-insn", *objects)
    found = filter(None, (re.search(sign, listing) for sign in signs))
    return [
        f"{tier}: holds an instruction that it does not ask for: {_place(listing, match.start())}" for match in found
    ]


def _place(listing: str, at: int) -> str:
    line = listing[listing.rfind("\n", 0, at) + 1 :].split("\n", 1)[0]
    label = listing.rfind("<", 0, listing.rfind(">:\n", 0, at))
    return f"{line.strip()} in {listing[label:].split('>:', 1)[0][1:]}"


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout  # noqa: S603 (the build's own tools)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
