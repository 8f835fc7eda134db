"""A start of our engine in this process's way, run by ``tests.benchmarks.start``: it says when each part is done.

``python -m tests.benchmarks.start_contestant MODEL_FOLDER ENGINE_JSON``: each line ``MARK name`` is stamped by who reads it.
"""

from __future__ import annotations

import json
import sys


def main(model: str, engine: str) -> None:
    """Start an engine and ask it for a token."""
    mark("interpreter")
    from vllm import LLM, SamplingParams

    mark("imports")
    llm = LLM(model=model, skip_tokenizer_init=True, **json.loads(engine))
    mark("engine")
    sampling = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
    llm.generate({"prompt_token_ids": list(range(10, 26))}, sampling, use_tqdm=False)
    mark("token")


def mark(name: str) -> None:
    """Tell that a part is done."""
    print(f"MARK {name}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
