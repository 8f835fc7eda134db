"""What would be refused of `secondary_tiers` at a server's start, said without one."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

from npu_kvconnector.errors import OptionError
from npu_kvconnector.tiers.durable.config import DurableConfig
from npu_kvconnector.tiers.remote.config import RemoteConfig
from npu_kvconnector.tiers.tcp.config import TCP_TIER, choose_transport

if TYPE_CHECKING:
    from collections.abc import Mapping

    from npu_kvconnector.config import OffloadConfig

__all__ = ["own_options", "tier_problems"]

_OF_ANY_TIER = ("type", "module_path", "backpressure", "guard")
_BACK_PRESSURE = "vllm.v1.kv_offload.tiering.backpressure"
"""Where vLLM looks for a class that is named without a module."""
_OURS = {"durable": DurableConfig.parse, "remote": RemoteConfig.parse}


def own_options(tier: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a tier without those that all tiers have."""
    dropped = (*_OF_ANY_TIER, "transport") if tier["type"] in ("p2p", TCP_TIER) else _OF_ANY_TIER
    return {name: value for name, value in tier.items() if name not in dropped}


def tier_problems(options: OffloadConfig) -> list[str]:
    """Return what is wrong with tiers, each with its place in the list; nothing is opened."""
    problems = _missing_classes(options)
    for number, tier in enumerate(options.secondary_tiers, 1):
        try:
            _check(tier, options.guard)
        except OptionError as error:
            problems.append(f"tier {number}, {tier['type']}: {error}")
    return problems


def _missing_classes(options: OffloadConfig) -> list[str]:
    """Return which classes of eviction and back pressure cannot be had."""
    classes = []
    if options.cache_policy_module_path is not None and options.eviction_policy not in ("lru", "arc"):
        classes.append((options.cache_policy_module_path, options.eviction_policy))
    for said in (options.backpressure, *(tier.get("backpressure") for tier in options.secondary_tiers)):
        for key in ("backpressure_cls", "policy_cls"):
            if isinstance(said, dict) and isinstance(said.get(key), str):
                module, _, name = said[key].rpartition(".")
                classes.append((module or _BACK_PRESSURE, name))
    return [problem for problem in map(_missing_class, dict.fromkeys(classes)) if problem]


def _missing_class(where: tuple[str, str]) -> str:
    """Return what is wrong with a class of a module, or nothing; nor where there is no vLLM, a problem of its own."""
    module, name = where
    if module.split(".")[0] == "vllm" and importlib.util.find_spec("vllm") is None:
        return ""
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ImportError as error:
        return f"the class {name!r} cannot be had: {error}"
    return "" if isinstance(found, type) else f"the module {module} has no class {name!r}"


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
        found = SecondaryTierFactory.get_tier_class(dict(tier))
    except OptionError:
        raise
    except (AssertionError, TypeError) as error:  # vLLM's, without a word of what is wrong
        msg = f"{tier['module_path']}.{tier['type']} is no SecondaryTierManager: derive it from vLLM's"
        raise OptionError(msg) from error
    except (ImportError, AttributeError, ValueError) as error:
        raise OptionError(str(error)) from error
    if missing := sorted(getattr(found, "__abstractmethods__", ())):
        msg = f"{found.__module__}.{found.__name__} lacks {', '.join(missing)}: a SecondaryTierManager must have them"
        raise OptionError(msg)
