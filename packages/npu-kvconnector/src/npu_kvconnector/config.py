"""OffloadConfig: what a user may say in ``kv_connector_extra_config``, parsed once and strictly."""

from __future__ import annotations

import dataclasses
import difflib
import re
from typing import TYPE_CHECKING, Any

from npu_kvconnector.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["OffloadConfig", "parse_bytes"]

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OffloadConfig:
    """The options, under the names that vLLM's own offloading connector uses."""

    cpu_bytes_to_use: int = 4 * 2**30
    """Host memory of one engine for KV blocks, all of its workers together."""
    blocks_per_chunk: int = 1
    """KV blocks kept, found and evicted together."""
    eviction_policy: str = "lru"
    """Which chunk goes first when the tier is full: "lru" or "arc"."""
    store_threshold: int = 0
    """Store a chunk only when it is offered for this many times; below 2, the first time."""
    offload_prompt_only: bool = True
    """Whether blocks filled while decoding are left out."""

    def __post_init__(self) -> None:
        for name, lowest in (("cpu_bytes_to_use", 1), ("blocks_per_chunk", 1), ("store_threshold", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
                msg = f"{name} must be a whole number of at least {lowest}, not {value!r}"
                raise OptionError(msg)
        if self.eviction_policy not in ("lru", "arc"):
            msg = f'eviction_policy must be "lru" or "arc", not {self.eviction_policy!r}'
            raise OptionError(msg)
        if not isinstance(self.offload_prompt_only, bool):
            msg = f"offload_prompt_only must be true or false, not {self.offload_prompt_only!r}"
            raise OptionError(msg)

    @classmethod
    def parse(cls, extra_config: Mapping[str, Any]) -> OffloadConfig:
        """Read ``kv_connector_extra_config``.

        Raises:
            OptionError: an unknown key (the message names the nearest one), or a value out of range.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        for key in extra_config:
            if key not in names:
                near = difflib.get_close_matches(key, names, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(names)}"
                msg = f"unknown key {key!r} in kv_connector_extra_config: {hint}"
                raise OptionError(msg)
        options = dict(extra_config)
        if "cpu_bytes_to_use" in options:
            options["cpu_bytes_to_use"] = parse_bytes(options["cpu_bytes_to_use"])
        return cls(**options)


def parse_bytes(value: object) -> int:
    """Return a number of bytes from 4294967296, "4294967296", "4GiB" or "4.5 GB".

    Raises:
        OptionError: anything else.
    """
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value == value // 1:
        return int(value)
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]I?|)B?\s*", value.upper()) if isinstance(value, str) else None
    if match is None:
        msg = f'cpu_bytes_to_use must be bytes or a size such as "4GiB", not {value!r}'
        raise OptionError(msg)
    return int(float(match[1]) * _UNITS[match[2]])
