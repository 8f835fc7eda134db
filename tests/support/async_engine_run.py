"""Runs vLLM's asynchronous engine, the one that servers use, on the model of a folder.

python -m tests.support.async_engine_run FOLDER REQUESTS TOKENS
"""

from __future__ import annotations

import asyncio
import sys

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM


async def generate(engine: AsyncLLM, number: int, tokens: int) -> None:
    """Send one request of `number` + 1 prompt tokens and read its answer to the end."""
    sampling = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False)
    prompt = {"prompt_token_ids": list(range(3, 4 + number))}
    async for _ in engine.generate(prompt, sampling, request_id=f"request-{number}"):
        pass


async def main(folder: str, requests: int, tokens: int) -> None:
    """Answer all requests at the same time, then shut down without a word to the loggers, as vLLM's server does."""
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(model=folder, skip_tokenizer_init=True, max_model_len=256, enforce_eager=True)
    )
    try:
        await asyncio.gather(*(generate(engine, number, tokens) for number in range(requests)))
    finally:
        engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
