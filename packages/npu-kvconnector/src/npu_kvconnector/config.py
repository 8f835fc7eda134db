"""OffloadConfig: what a user may say in ``kv_connector_extra_config``, parsed once and strictly."""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import sys
from collections.abc import Mapping
from typing import Any

from npu_kvconnector.checks import check_flags, check_number, check_texts
from npu_kvconnector.errors import OptionError

__all__ = ["REFUSED", "GuardConfig", "OffloadConfig", "parse_bytes"]

_LEAST = sys.float_info.min  # above 0
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}

REFUSED = {
    "spec_name": "this connector brings its own; name OffloadingConnector as kv_connector to use another",
    "spec_module_path": "this connector brings its own; name OffloadingConnector as kv_connector to use another",
    "sync_load_budget_bytes": "no step waits for a load here; leave it out",  # of vLLM 0.33
    "tier_poll_interval_s": "tiers are asked at each step, not by a thread; leave it out",  # of vLLM 0.33
}
"""Keys of vLLM's offloading connector that mean nothing here, and the way out."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GuardConfig:
    """When a secondary tier is slow or broken, and for how long it is left alone then; times in seconds."""

    load_seconds: float = 5.0
    """A load that takes longer is waited for no more: its tokens are computed."""
    lookup_seconds: float = 0.5
    """A request waits no longer for a tier to say what it has; so long stands an engine whose requests all ask one that
    is silent, before the breaker opens. Where it is not given, a tier that is known to be quick has less."""
    store_seconds: float = 30.0
    """A store that takes longer counts as a failure."""
    call_seconds: float = 0.1
    """A call that keeps the scheduler longer counts as a failure."""
    failures: int = 5
    """So many failures in a row open the circuit breaker: the tier is skipped."""
    open_seconds: float = 5.0
    """How long it is skipped before one transfer may try; doubled with each failed try."""
    max_open_seconds: float = 60.0
    """The longest of these times, and how long a chunk that could not be loaded is not asked for."""
    pending_share: float = 0.5
    """Part of the host tier's chunks that may wait to be stored to this tier; further ones are not stored to it."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            most = 1 if field.name == "pending_share" else math.inf
            text = f"a number above 0{'' if math.isinf(most) else f', at most {most}'}"
            name, is_whole = f"guard: {field.name}", field.name == "failures"
            check_number(name, getattr(self, field.name), _LEAST, most=most, is_whole=is_whole, text=text)

    @classmethod
    def parse(cls, options: object) -> GuardConfig:
        """Read a ``guard`` of ``kv_connector_extra_config`` or of a tier.

        Raises:
            OptionError: no dictionary, an unknown key, or a value out of range.
        """
        return cls(**_known(options, [field.name for field in dataclasses.fields(cls)], "guard"))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OffloadConfig:
    """The options, under the names that vLLM's own offloading connector uses; `guard` is ours."""

    cpu_bytes_to_use: int = 4 * 2**30
    """Host memory of one engine for KV blocks, all of its workers together."""
    blocks_per_chunk: int | None = None
    """KV blocks kept, found and evicted together; None: 1, or what `block_size` makes it."""
    block_size: int | None = None
    """The same in tokens, a multiple of the KV cache's block size."""
    eviction_policy: str = "lru"
    """Which chunk goes first when the tier is full: "lru", "arc", or a class of `cache_policy_module_path`."""
    cache_policy_module_path: str | None = None
    """The module of an eviction policy of your own."""
    store_threshold: int = 0
    """Store a chunk only when it is offered for this many times; below 2, the first time."""
    max_tracker_size: int = 64_000
    """Of how many chunks the offers are counted."""
    offload_prompt_only: bool = True
    """Whether blocks filled while decoding are left out."""
    self_describing_kv_events: bool = False
    """Whether KV events carry the tokens of what was stored, for routers that follow them."""
    canonical_layout: bool = False
    """Whether chunks are laid out as without parallelism, so that engines of other TP sizes can load them."""
    secondary_tiers: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    """The tiers behind the host's: each a type ("durable", "remote", vLLM's "fs", ...) and that tier's options."""
    backpressure: dict[str, Any] | None = None
    """vLLM's back pressure of all tiers: {"backpressure_cls": "EMABackpressureDetector"}."""
    guard: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Deadlines and circuit breaker of all tiers; a tier's own `guard` goes before. See GuardConfig."""

    def __post_init__(self) -> None:
        _check_numbers(self)
        check_flags(self, "offload_prompt_only", "self_describing_kv_events", "canonical_layout")
        check_texts(self, "eviction_policy", may_be_none=("cache_policy_module_path",))
        if self.blocks_per_chunk is not None and self.block_size is not None:
            msg = "blocks_per_chunk and block_size say the same twice; give one of them"
            raise OptionError(msg)
        if self.eviction_policy not in {"lru", "arc"} and self.cache_policy_module_path is None:
            msg = f'eviction_policy must be "lru", "arc", or in cache_policy_module_path, not {self.eviction_policy!r}'
            raise OptionError(msg)
        if self.backpressure is not None and not isinstance(self.backpressure, dict):
            msg = f"backpressure must be an object, not {self.backpressure!r}"
            raise OptionError(msg)
        if not isinstance(self.secondary_tiers, list):
            msg = f"secondary_tiers must be a list of objects, not {self.secondary_tiers!r}"
            raise OptionError(msg)
        GuardConfig.parse(self.guard)
        for tier in self.secondary_tiers:
            self.guard_of(tier)

    @classmethod
    def parse(cls, extra_config: Mapping[str, Any]) -> OffloadConfig:
        """Read ``kv_connector_extra_config``.

        Raises:
            OptionError: an unknown key (the message names the nearest one), or a value out of range.
        """
        if not isinstance(extra_config, Mapping):
            msg = f"kv_connector_extra_config must be an object, not {extra_config!r}"
            raise OptionError(msg)
        for key in extra_config:
            if key in REFUSED:
                msg = f"{key} is refused in kv_connector_extra_config: {REFUSED[key]}"
                raise OptionError(msg)
        names = [field.name for field in dataclasses.fields(cls)]
        options = _known(dict(extra_config), names, "kv_connector_extra_config")
        if "cpu_bytes_to_use" in options:
            options["cpu_bytes_to_use"] = parse_bytes(options["cpu_bytes_to_use"])
        return cls(**options)

    def guard_of(self, tier: object) -> GuardConfig:
        """Return what guards a tier of `secondary_tiers`.

        Raises:
            OptionError: the tier is no object with a type, or its guard is wrong.
        """
        if not isinstance(tier, dict) or not isinstance(tier.get("type"), str):
            msg = f'each of secondary_tiers must be an object with a "type", not {tier!r}'
            raise OptionError(msg)
        own = tier.get("guard", {})
        return GuardConfig.parse({**self.guard, **own} if isinstance(own, dict) else own)

    def for_vllm(self) -> dict[str, Any]:
        """Return the options as vLLM's frame reads them: a deep copy, without those left open.

        Raises:
            OptionError: a p2p tier asks for a transport that is not there, or has options of another.
        """
        options = {name: value for name, value in dataclasses.asdict(self).items() if value is not None}
        if any(tier["type"].startswith("p2p") for tier in self.secondary_tiers):
            from npu_kvconnector.tiers.tcp.config import choose_transport  # which asks vLLM for NIXL

            options["secondary_tiers"] = [choose_transport(tier, self.guard) for tier in options["secondary_tiers"]]
        return options


def parse_bytes(value: object, name: str = "cpu_bytes_to_use", *, example: str = "4GiB") -> int:
    """Return a number of bytes from 4294967296, "4294967296", "4GiB" or "4.5 GB"; an error says the example.

    Raises:
        OptionError: anything else.
    """
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value == value // 1:
        return int(value)
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]I?|)B?\s*", value.upper()) if isinstance(value, str) else None
    if match is None:
        msg = f'{name} must be a number of bytes or a size such as "{example}", not {value!r}'
        raise OptionError(msg)
    number = float(match[1]) * _UNITS[match[2]]
    if math.isinf(number):
        msg = f"{name} must be a number of bytes that there can be, not {str(value)[:40]}..."
        raise OptionError(msg)
    return int(number)


def _known(options: object, names: list[str], where: str) -> dict[str, Any]:
    """Return the options if all of them are known."""
    if not isinstance(options, dict):
        msg = f"{where} must be an object, not {options!r}"
        raise OptionError(msg)
    for key in options:
        if key not in names:
            near = difflib.get_close_matches(str(key), names, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(names)}"
            msg = f"unknown key {key!r} in {where}: {hint}"
            raise OptionError(msg)
    return options


def _check_numbers(config: OffloadConfig) -> None:
    for name in ("cpu_bytes_to_use", "blocks_per_chunk", "block_size", "store_threshold", "max_tracker_size"):
        value, least = getattr(config, name), 0 if name == "store_threshold" else 1
        if value is not None or name not in {"blocks_per_chunk", "block_size"}:
            check_number(name, value, least, is_whole=True)
