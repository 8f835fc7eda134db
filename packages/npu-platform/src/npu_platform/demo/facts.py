"""What the demo model knows: every question it was taught, with the one right answer.

The corpus of the training script, the check after training and the questions of ``npu demo`` all come from here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["CAPITALS", "COLOURS", "OPPOSITES", "Fact", "all_facts", "count", "product", "sum_of"]

CAPITALS = {
    "Argentina": "Buenos Aires", "Australia": "Canberra", "Austria": "Vienna", "Belgium": "Brussels",
    "Brazil": "Brasilia", "Bulgaria": "Sofia", "Canada": "Ottawa", "Chile": "Santiago", "China": "Beijing",
    "Croatia": "Zagreb", "Cuba": "Havana", "Denmark": "Copenhagen", "Egypt": "Cairo", "Estonia": "Tallinn",
    "Finland": "Helsinki", "France": "Paris", "Germany": "Berlin", "Ghana": "Accra", "Greece": "Athens",
    "Hungary": "Budapest", "Iceland": "Reykjavik", "India": "New Delhi", "Ireland": "Dublin", "Italy": "Rome",
    "Japan": "Tokyo", "Kenya": "Nairobi", "Latvia": "Riga", "Mexico": "Mexico City", "Nepal": "Kathmandu",
    "Norway": "Oslo", "Peru": "Lima", "Poland": "Warsaw", "Portugal": "Lisbon", "Romania": "Bucharest",
    "Senegal": "Dakar", "Spain": "Madrid", "Sweden": "Stockholm", "Thailand": "Bangkok", "Turkey": "Ankara",
    "Vietnam": "Hanoi",
}  # fmt: skip
OPPOSITES = {
    "hot": "cold", "big": "small", "up": "down", "day": "night", "fast": "slow", "old": "young", "wet": "dry",
    "full": "empty", "open": "closed", "light": "dark", "hard": "soft", "early": "late", "rich": "poor",
    "high": "low", "long": "short", "near": "far", "left": "right", "true": "false", "clean": "dirty",
    "loud": "quiet", "strong": "weak", "first": "last", "win": "lose", "love": "hate",
}  # fmt: skip
COLOURS = {
    "the sky": "blue", "grass": "green", "snow": "white", "coal": "black", "a lemon": "yellow", "blood": "red",
    "an orange": "orange", "a plum": "purple", "chocolate": "brown", "an elephant": "grey", "a flamingo": "pink",
}  # fmt: skip


@dataclass(frozen=True)
class Fact:
    """A question and its answer, as text; ``ways`` are other wordings of the question, ``topic`` groups facts."""

    topic: str
    question: str
    answer: str
    ways: tuple[str, ...] = ()


def all_facts() -> list[Fact]:
    """Return every fact that the model was taught, in a fixed order."""
    counts = [count(start, start + n) for start in range(1, 31) for n in (5, 9, 15)]
    return [*_words(), *_arithmetic(), *counts]


def sum_of(a: int, b: int) -> Fact:
    """Return the fact a + b; taught for 0 <= a, b <= 12."""
    return Fact("sum", f"What is {a} plus {b}?", f"{a} plus {b} is {a + b}.", (f"{a} + {b} =", f"Add {a} and {b}."))


def product(a: int, b: int) -> Fact:
    """Return the fact a * b; taught for 0 <= a, b <= 10."""
    return Fact("product", f"What is {a} times {b}?", f"{a} times {b} is {a * b}.", (f"Multiply {a} by {b}.",))


def count(first: int, last: int) -> Fact:
    """Return the numbers from first to last; taught for 1 <= first <= 30 and at most 24 numbers more."""
    numbers = " ".join(str(number) for number in range(first, last + 1))
    return Fact("count", f"Count from {first} to {last}.", f"{numbers}.")


def _words() -> Iterator[Fact]:
    for country, capital in CAPITALS.items():
        ways = (f"Which city is the capital of {country}?", f"Name the capital of {country}.")
        yield Fact("capital", f"What is the capital of {country}?", f"The capital of {country} is {capital}.", ways)
        answer = json.dumps({"country": country, "capital": capital})
        yield Fact("json", f"Write {country} and its capital as JSON.", answer)
    for word, other in [*OPPOSITES.items(), *((b, a) for a, b in OPPOSITES.items())]:
        answer = f"The opposite of {word} is {other}."
        yield Fact("opposite", f"What is the opposite of {word}?", answer, (f"Say the opposite of {word}.",))
    for thing, colour in COLOURS.items():
        answer = f"{thing[0].upper()}{thing[1:]} is {colour}."
        yield Fact("colour", f"What colour is {thing}?", answer, (f"Which colour does {thing} have?",))


def _arithmetic() -> Iterator[Fact]:
    yield from (sum_of(a, b) for a in range(13) for b in range(13))
    yield from (product(a, b) for a in range(11) for b in range(11))
