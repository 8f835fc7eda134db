"""Mixed load on a real server: many kinds of requests, some given up, some kept to be asked again when it is quiet."""

from __future__ import annotations

import base64
import contextlib
import io
import random
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httpx

from tests.support import multimodal

if TYPE_CHECKING:
    from collections.abc import Callable

    from npu_platform.demo.server import Server

__all__ = ["CHAT_TEMPLATE", "Kept", "Traffic", "ask", "image_url"]

CLIENTS = 6
_MOST_KEPT = 400  # of all that are answered, each as likely to be among them
_TIMEOUT = 120.0
_IMAGES = 4
_RETRIES = 3  # of an image: a sleep empties vLLM's cache of images in the engine before that of the API server
CHAT_TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}"
)
"""For models of ``tests.support.multimodal``, whose tokenizer knows words t0 to t511."""


@dataclass(frozen=True)
class Kept:
    """A request, and the choices of its answer."""

    path: str
    body: dict[str, Any]
    choices: list[dict[str, Any]]


@dataclass
class Traffic:
    """Clients that ask a server of ``tiny_qwen2_5_vl`` with adapters `adapters`, each as its own seed chooses."""

    server: Server
    adapters: tuple[str, ...]
    counts: Counter[str] = field(default_factory=Counter)
    kept: list[Kept] = field(default_factory=list)
    _chance: random.Random = field(default_factory=lambda: random.Random(0))

    def run(self, seconds: float, meanwhile: Callable[[float], None]) -> None:
        """Send requests for so long, and call `meanwhile` with the time (``time.monotonic``) at which to end."""
        end = time.monotonic() + seconds
        with ThreadPoolExecutor(CLIENTS) as pool:
            clients = [pool.submit(self._client, number, end) for number in range(CLIENTS)]
            try:
                meanwhile(end)
            finally:
                for client in clients:
                    client.result()

    def replay(self) -> list[str]:
        """Ask everything that was kept again, one by one; return what came out differently."""
        wrong = []
        for one in self.kept:
            again = ask(self.server, one.path, one.body)
            choices = again.json().get("choices") if again.status_code == httpx.codes.OK else again.text
            if choices != one.choices:
                wrong.append(f"{one.path} {str(one.body)[:400]}\n  then {one.choices}\n  now  {choices}")
        return wrong

    def _client(self, number: int, end: float) -> None:
        chance = random.Random(number)
        while time.monotonic() < end:
            kind = chance.choices(("ask", "see", "leave", "wrong"), (70, 10, 15, 5))[0]
            getattr(self, f"_{kind}")(chance)

    def _ask(self, chance: random.Random) -> None:
        self._keep("/v1/completions", _completion(chance, ("demo", *self.adapters)))

    def _see(self, chance: random.Random) -> None:
        text = {"type": "text", "text": _words(chance, chance.randint(1, 40))}
        image = {"type": "image_url", "image_url": {"url": image_url(chance.randrange(_IMAGES))}}
        content = [image, text] if chance.random() < 0.7 else [text, image, image]
        body = {"model": "demo", "messages": [{"role": "user", "content": content}], **_sampling(chance)}
        body["max_tokens"] = chance.randint(1, 16)
        self._keep("/v1/chat/completions", body, retries=_RETRIES)

    def _leave(self, chance: random.Random) -> None:
        """Hang up in the middle of a stream."""
        body = _completion(chance, ("demo", *self.adapters)) | {"max_tokens": 150, "stream": True, "n": 1}
        url, events = f"{self.server.url}/v1/completions", chance.randint(0, 20)
        with (
            contextlib.suppress(httpx.HTTPError),
            httpx.stream("POST", url, json=body, timeout=_TIMEOUT, trust_env=False) as answer,
        ):
            for number, _ in enumerate(answer.iter_lines()):
                if number >= events:
                    break
        self.counts["left"] += 1

    def _wrong(self, chance: random.Random) -> None:
        body = _completion(chance, ("demo",)) | {"max_tokens": -chance.randint(1, 9)}
        assert ask(self.server, "/v1/completions", body).status_code == httpx.codes.BAD_REQUEST
        self.counts["refused"] += 1

    def _keep(self, path: str, body: dict[str, Any], retries: int = 0) -> None:
        answer = ask(self.server, path, body)
        while answer.status_code == httpx.codes.INTERNAL_SERVER_ERROR and retries > 0:
            self.counts["retried"] += 1
            retries -= 1
            answer = ask(self.server, path, body)
        assert answer.status_code == httpx.codes.OK, f"{answer.status_code}: {answer.text[-2000:]}\n{body}"
        choices = answer.json()["choices"]
        if any(choice["finish_reason"] == "abort" for choice in choices):  # by a sleep
            self.counts["aborted"] += 1
            return
        self.counts[path] += 1
        self.counts["structured"] += "structured_outputs" in body
        self.counts["adapters"] += body["model"] in self.adapters
        seen = self.counts["/v1/completions"] + self.counts["/v1/chat/completions"]
        if len(self.kept) < _MOST_KEPT:
            self.kept.append(Kept(path, body, choices))
        elif self._chance.random() < _MOST_KEPT / seen:  # Vitter's algorithm R
            self.kept[self._chance.randrange(_MOST_KEPT)] = Kept(path, body, choices)


def ask(server: Server, path: str, body: dict[str, Any]) -> httpx.Response:
    """Post a request."""
    return httpx.post(f"{server.url}{path}", json=body, timeout=_TIMEOUT, trust_env=False)


def _completion(chance: random.Random, models: tuple[str, ...]) -> dict[str, Any]:
    """Return a request of any length, model and way to choose tokens."""
    prompt = [chance.randint(10, 511) for _ in range(chance.choice((1, 5, 17, 40, 100, 300)))]
    if chance.random() < 0.3:  # which others share
        prompt = [*range(20, 120), *prompt[:100]]
    body: dict[str, Any] = {"model": chance.choice(models), "prompt": prompt, "max_tokens": chance.randint(1, 64)}
    if chance.random() < 0.2:
        body["structured_outputs"] = {"regex": chance.choice(("(t[1-4][0-9]*)+", "(t[0-9]+)+"))}
    if chance.random() < 0.3:
        body["logprobs"] = 2
    body |= _sampling(chance)
    if body["temperature"] and chance.random() < 0.3:
        body["n"] = 2
    return body


def _sampling(chance: random.Random) -> dict[str, Any]:
    found: dict[str, Any] = {"ignore_eos": True, "temperature": 0}
    if chance.random() < 0.5:
        found |= {"temperature": 0.9, "seed": chance.randrange(1000), "top_p": 0.9, "top_k": 40}
    if chance.random() < 0.2:
        found |= {"presence_penalty": 0.5, "repetition_penalty": 1.2}
    if chance.random() < 0.1:
        found["min_p"] = 0.05
    return found


def _words(chance: random.Random, number: int) -> str:
    return " ".join(f"t{chance.randint(10, 511)}" for _ in range(number))


def image_url(seed: int, size: tuple[int, int] | None = None) -> str:
    """Return a picture as clients send it, another for each seed, in a size of its own or this one."""
    file, picture = io.BytesIO(), multimodal.image(seed)
    (picture.resize(size) if size else picture).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
