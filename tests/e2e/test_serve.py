"""`vllm serve` of the demo model on npu, driven over HTTP as clients drive it."""

from __future__ import annotations

import asyncio
import json
import math
import time
from typing import TYPE_CHECKING, Any

import httpx
import jsonschema
import openai
import pytest

from npu_platform.demo.facts import all_facts, count, product, sum_of
from tests.support.server import LONG, PATIENCE, Load, metric, serve_demo, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from npu_platform.demo.server import Server

CAPITAL_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"country": {"type": "string"}, "capital": {"type": "string"}},
    "required": ["country", "capital"],
    "additionalProperties": False,
}
# Near enough to what the model was taught that it does not lose itself in the whitespace that JSON allows anywhere.
NARROW_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"country": {"enum": ["Peru", "Norway"]}, "capital": {"enum": ["Paris", "Rome"]}},
    "required": ["country", "capital"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serve_demo(tmp_path_factory.mktemp("serve"), fresh=True) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    transport = httpx.Client(trust_env=False)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, http_client=transport) as client:
        yield client


def chat(client: openai.OpenAI, question: str, **options: Any) -> Any:
    messages = [{"role": "user", "content": question}]
    return client.chat.completions.create(
        model="demo", messages=messages, **{"temperature": 0, "max_tokens": 128} | options
    )


def test_completion_continues_plain_text(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="demo", prompt="The capital of France is", temperature=0, max_tokens=16)
    assert answer.choices[0].text == " Paris."
    assert answer.choices[0].finish_reason == "stop"


def test_completion_takes_several_prompts(client: openai.OpenAI) -> None:
    prompts = ["The capital of Peru is", "3 plus 4 is", "The opposite of hot is"]
    answer = client.completions.create(model="demo", prompt=prompts, temperature=0, max_tokens=16)
    assert [choice.text for choice in answer.choices] == [" Lima.", " 7.", " cold."]


@pytest.mark.parametrize("topic", ["capital", "sum", "product", "opposite", "colour", "count", "json"])
def test_chat_answers_what_the_model_was_taught(client: openai.OpenAI, topic: str) -> None:
    facts = [fact for fact in all_facts() if fact.topic == topic][::9]
    answers = [chat(client, fact.question).choices[0].message.content for fact in facts]
    right = sum(answer == fact.answer for answer, fact in zip(answers, facts, strict=True))
    assert right >= math.ceil(0.9 * len(facts)), list(zip(answers, facts, strict=True))


def test_chat_keeps_a_conversation_apart_from_the_next_question(client: openai.OpenAI) -> None:
    messages = [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": sum_of(2, 3).question},
        {"role": "assistant", "content": sum_of(2, 3).answer},
        {"role": "user", "content": product(4, 5).question},
    ]
    answer = client.chat.completions.create(model="demo", messages=messages, temperature=0, max_tokens=32)
    assert answer.choices[0].message.content == product(4, 5).answer


def test_stream_gives_the_same_text_in_pieces(client: openai.OpenAI) -> None:
    fact = count(5, 20)
    events = list(chat(client, fact.question, stream=True, stream_options={"include_usage": True}))
    pieces = [event.choices[0].delta.content for event in events if event.choices and event.choices[0].delta.content]
    assert len(pieces) > 5
    assert "".join(pieces) == fact.answer == chat(client, fact.question).choices[0].message.content
    # A taught answer ends with the end token, which is counted but not shown.
    assert events[-1].usage.completion_tokens >= len(pieces)


def test_completion_logprobs_are_those_of_the_greedy_choice(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="demo", prompt="5 plus 6 is", temperature=0, max_tokens=4, logprobs=3)
    logprobs = answer.choices[0].logprobs
    assert "".join(logprobs.tokens).startswith(" 11")
    for chosen, best in zip(logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert len(best) >= 3
        assert chosen == max(best.values())
        assert sum(math.exp(value) for value in best.values()) <= 1 + 1e-3


def test_chat_logprobs_know_the_answer_for_sure(client: openai.OpenAI) -> None:
    answer = chat(client, "What is 5 plus 6?", logprobs=True, top_logprobs=2)
    content = answer.choices[0].logprobs.content
    assert "".join(token.token for token in content).startswith("5 plus 6 is 11.")
    assert all(token.logprob > math.log(0.5) for token in content)
    assert all(len(token.top_logprobs) == 2 for token in content)


def test_prompt_logprobs_grade_the_prompt(client: openai.OpenAI) -> None:
    options = {"model": "demo", "temperature": 0, "max_tokens": 1, "echo": True, "logprobs": 0}
    right, wrong = (
        client.completions.create(prompt=f"The capital of France is {city}.", **options).choices[0].logprobs
        for city in ("Paris", "Oslo")
    )
    assert right.token_logprobs[0] is None
    assert sum(right.token_logprobs[1:]) > sum(wrong.token_logprobs[1:]) + 1


def test_stop_string_ends_the_answer_and_is_left_out(client: openai.OpenAI) -> None:
    answer = chat(client, count(4, 19).question, stop=[" 9"]).choices[0]
    assert answer.message.content == "4 5 6 7 8"
    assert answer.finish_reason == "stop"


def test_token_limit_ends_the_answer(client: openai.OpenAI) -> None:
    answer = chat(client, count(4, 19).question, max_tokens=3)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 3


def test_seeded_sampling_repeats(client: openai.OpenAI) -> None:
    options = {"temperature": 1.5, "top_p": 0.95, "seed": 11, "extra_body": {"top_k": 50}}
    texts = [chat(client, "Tell me a story.", **options).choices[0].message.content for _ in range(3)]
    other = chat(client, "Tell me a story.", **options | {"seed": 12}).choices[0].message.content
    assert texts[0] == texts[1] == texts[2] != other


@pytest.mark.parametrize("schema", [CAPITAL_SCHEMA, NARROW_SCHEMA], ids=["taught", "narrow"])
def test_json_schema_gives_a_complete_valid_object(client: openai.OpenAI, schema: dict[str, Any]) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    answer = chat(client, "Write Norway and its capital as JSON.", response_format=form, max_tokens=256).choices[0]
    assert answer.finish_reason == "stop", answer.message.content
    value = json.loads(answer.message.content)
    jsonschema.validate(value, schema)
    if schema is CAPITAL_SCHEMA:
        assert value == {"country": "Norway", "capital": "Oslo"}


def test_concurrent_clients_each_get_their_own_answer(server: Server, client: openai.OpenAI) -> None:
    # More clients than --max-num-seqs, with answers of different lengths.
    questions = [sum_of(a, 12 - a).question for a in range(13)]
    questions += [count(a, a + 5 + a % 9).question for a in range(1, 14)]

    async def ask_all() -> list[str]:
        async with httpx.AsyncClient(timeout=120, trust_env=False) as client:
            return await asyncio.gather(*(ask(client, question) for question in questions))

    async def ask(client: httpx.AsyncClient, question: str) -> str:
        body = {"model": "demo", "messages": [{"role": "user", "content": question}], "temperature": 0}
        answer = await client.post(f"{server.url}/v1/chat/completions", json=body | {"max_tokens": 128})
        return answer.raise_for_status().json()["choices"][0]["message"]["content"]

    alone = [chat(client, question).choices[0].message.content for question in questions]
    assert len(set(alone)) == len(questions), "who got another's answer would go unnoticed"
    assert asyncio.run(ask_all()) == alone


def test_client_that_hangs_up_frees_its_request(server: Server, client: openai.OpenAI) -> None:
    generated = metric(server, "vllm:generation_tokens_total")
    finished = metric(server, "vllm:request_success_total")
    body = {"prompt": LONG["prompt"], "max_tokens": LONG["max_tokens"], "extra_body": {"ignore_eos": True}}
    stream = client.completions.create(model="demo", stream=True, **body)
    for _, _ in zip(range(3), stream, strict=False):
        pass
    stream.close()
    assert until(lambda: metric(server, "vllm:num_requests_running") == 0)
    # It did not merely run to its end unseen.
    assert metric(server, "vllm:generation_tokens_total") - generated < LONG["max_tokens"]
    assert metric(server, "vllm:request_success_total") == finished
    assert metric(server, "vllm:kv_cache_usage_perc") == 0
    assert chat(client, sum_of(1, 2).question).choices[0].message.content == sum_of(1, 2).answer


@pytest.mark.parametrize(
    ("body", "word"),
    [({"prompt": "1 " * 4000, "max_tokens": 4}, "2048"), ({"prompt": "1", "temperature": -1}, "temperature")],
    ids=["too long", "bad temperature"],
)
def test_bad_request_is_refused_and_the_server_goes_on(
    server: Server, client: openai.OpenAI, body: dict[str, Any], word: str
) -> None:
    answer = httpx.post(f"{server.url}/v1/completions", json={"model": "demo"} | body, trust_env=False)
    assert answer.status_code == 400
    assert word in answer.text
    assert chat(client, sum_of(1, 2).question).choices[0].message.content == sum_of(1, 2).answer


def test_sigterm_while_busy_ends_every_process_in_time(tmp_path: Path) -> None:
    # vLLM kills its engine before that can end the streams, and its API server then waits for the clients to give up
    # (seen on its CPU platform, too): so the bound is the clients' patience, and a little.
    with serve_demo(tmp_path) as server:
        load = Load(server, clients=8)
        load.start()
        begin = time.monotonic()
        assert len(server.processes_alive()) >= 2
        clean = server.stop(timeout=3 * PATIENCE)
        load.join()
        assert clean, server.log_tail()
        assert time.monotonic() - begin < 3 * PATIENCE
        assert server.processes_alive() == []
        assert server.exit_code == 0, server.log_tail()
