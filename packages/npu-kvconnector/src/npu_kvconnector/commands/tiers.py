"""What would be refused of `secondary_tiers` at a server's start, said without one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from npu_kvconnector.errors import OptionError
from npu_kvconnector.tiers.durable.config import DurableConfig
from npu_kvconnector.tiers.remote.config import RemoteConfig
from npu_kvconnector.tiers.tcp.config import TCP_TIER, choose_transport

if TYPE_CHECKING:
    from collections.abc import Mapping

    from npu_kvconnector.config import OffloadConfig

__all__ = ["own_options", "tier_problems"]

_OF_ANY_TIER = ("type", "transport", "module_path", "backpressure", "guard")
_OURS = {"durable": DurableConfig.parse, "remote": RemoteConfig.parse}


def own_options(tier: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a tier without those that all tiers have."""
    return {name: value for name, value in tier.items() if name not in _OF_ANY_TIER}


def tier_problems(options: OffloadConfig) -> list[str]:
    """Return what is wrong with tiers, each with its place in the list; nothing is opened."""
    problems = []
    for number, tier in enumerate(options.secondary_tiers, 1):
        try:
            _check(tier, options.guard)
        except OptionError as error:
            problems.append(f"tier {number}, {tier['type']}: {error}")
    return problems


def _check(tier: Mapping[str, Any], guard: Mapping[str, Any]) -> None:
    parse = _OURS.get(tier["type"])
    if parse is not None:
        parse(own_options(tier))
        return
    try:
        from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

        import npu_kvconnector.spec  # noqa: F401  # registers our tiers
    except ImportError:  # which is a problem of its own
        return
    try:
        if tier["type"] in ("p2p", TCP_TIER):
            tier = choose_transport(tier, guard)
        SecondaryTierFactory.get_tier_class(dict(tier))
    except OptionError:
        raise
    except (ImportError, AttributeError, AssertionError, ValueError) as error:
        raise OptionError(str(error)) from error
