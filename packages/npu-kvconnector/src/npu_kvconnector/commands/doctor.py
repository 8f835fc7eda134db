"""`npu-kv doctor`: what a token of a model takes, how many the tiers of a configuration hold, and whether they fit."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from npu_kvconnector.commands.tiers import own_options, tier_problems
from npu_kvconnector.config import OffloadConfig
from npu_kvconnector.errors import KVConnectorError, OptionError
from npu_kvconnector.tiers.durable.config import DurableConfig
from npu_kvconnector.tiers.durable.files import supports_direct
from npu_kvconnector.tiers.durable.segments import segments_in
from npu_kvconnector.tiers.memory import available_bytes
from npu_kvconnector.tiers.remote.config import RemoteConfig
from npu_kvconnector.tiers.tcp.config import TCP_TIER, TcpConfig

__all__ = ["bytes_per_token", "diagnose"]

_SCALE_BYTES = 4  # of a token and head, in caches whose values have such scales


def diagnose(model: str, config: str, *, kv_cache_dtype: str = "auto") -> dict[str, Any]:
    """Return sizes by tier, and the problems found.

    Args:
        model: a folder with a config.json, or a model in Hugging Face's cache.
        config: kv_connector_extra_config, in JSON.
        kv_cache_dtype: as vLLM's option.
    """
    problems: list[str] = []
    report: dict[str, Any] = {"model": model, "problems": problems}
    try:
        each = bytes_per_token(_settings(model), kv_cache_dtype)
        options = OffloadConfig.parse(json.loads(config))
    except (KVConnectorError, ValueError, TypeError) as error:
        problems.append(str(error))
        return report
    report["kv_bytes_per_token"] = each
    memory = available_bytes()
    host = options.cpu_bytes_to_use
    report["host"] = {"bytes": host, "available": memory, "tokens": host // each}
    behind = [dict(tier) for tier in options.secondary_tiers]
    tiers = [tier for tier in behind if tier.get("type") == "durable"]
    report["durable"] = [_durable(tier, each, problems) for tier in tiers]
    report["remote"] = [_remote(tier, problems) for tier in behind if tier.get("type") == "remote"]
    report["p2p_tcp"] = [_over_tcp(tier, each, problems) for tier in behind if _is_over_tcp(tier)]
    problems += [found for found in tier_problems(options) if not found.endswith(tuple(problems))]
    beside = sum(tier.get("memory", 0) for tier in (*report["remote"], *report["p2p_tcp"]))
    if host + beside > memory:
        what = f"cpu_bytes_to_use={host}" + (f", with {beside} bytes of the tiers behind it," if beside else "")
        problems.append(f"{what} is more than the {memory} bytes available in memory; lower it")
    if not tiers:
        report["hint"] = (
            'a durable tier keeps prefixes through restarts: {"type": "durable", "path": ..., "bytes": ...}'
        )
    return report


def bytes_per_token(settings: dict[str, Any], kv_cache_dtype: str = "auto") -> int:
    """Return the bytes that a token takes in the KV caches of all attention layers, all ranks together.

    Args:
        settings: the model's config.json.
        kv_cache_dtype: as vLLM's option.

    Raises:
        OptionError: the settings do not say what is needed.
    """
    text = settings.get("text_config", settings)
    dtype = kv_cache_dtype if kv_cache_dtype != "auto" else text.get("dtype") or text.get("torch_dtype") or "bfloat16"
    size = 4 if str(dtype).startswith("float32") or dtype == "float" else 2
    if str(dtype).startswith(("fp8", "int8")):
        size = 1
    scales = _SCALE_BYTES if str(dtype).endswith("_per_token_head") else 0
    try:
        layers = text["num_hidden_layers"]
        kinds = text.get("layer_types")
        if kinds:
            layers = sum("attention" in kind and "linear" not in kind for kind in kinds)
        if text.get("kv_lora_rank"):
            return int(layers * (text["kv_lora_rank"] + text["qk_rope_head_dim"]) * size)
        heads = text["num_attention_heads"]
        width = text.get("head_dim") or text["hidden_size"] // heads
        return int(2 * layers * (text.get("num_key_value_heads") or heads) * (width * size + scales))
    except (KeyError, TypeError, ZeroDivisionError) as error:
        msg = f"the model's config.json does not say {error}: is it a text model?"
        raise OptionError(msg) from error


def _settings(model: str) -> dict[str, Any]:
    path: object = Path(model) / "config.json"
    if not Path(model).is_dir():
        try:
            from huggingface_hub import try_to_load_from_cache

            path = try_to_load_from_cache(model, "config.json")
        except (ImportError, ValueError):
            path = None
    if not isinstance(path, (str, Path)) or not Path(path).is_file():
        msg = f"--model {model}: neither a folder with a config.json nor a model in Hugging Face's cache"
        raise OptionError(msg)
    found = json.loads(Path(path).read_text())
    if not isinstance(found, dict):
        msg = f"{path} holds no object"
        raise OptionError(msg)
    return found


def _durable(tier: dict[str, Any], each: int, problems: list[str]) -> dict[str, Any]:
    """Return what a durable tier holds, and what of the disk it is on."""
    try:
        options = DurableConfig.parse(own_options(tier))
    except OptionError as error:
        problems.append(str(error))
        return {}
    path = Path(options.path)
    disk = next(parent for parent in (path, *path.parents) if parent.is_dir())
    report: dict[str, Any] = {"path": options.path, "bytes": options.bytes, "tokens": options.bytes // each}
    if not os.access(disk, os.W_OK | os.X_OK):
        problems.append(f"path={path}: {disk} cannot be written by this user")
        return report
    free = shutil.disk_usage(disk).free + sum(segments_in(path / "segments").values())
    report |= {"available": free, "past_the_page_cache": supports_direct(disk)}
    if options.bytes > free:
        problems.append(f"bytes={options.bytes} is more than the {free} bytes that are free on the disk; lower it")
    if str(disk).startswith("/dev/shm") or shutil.disk_usage(disk).total == 0:  # noqa: S108
        problems.append(f"path={path} is in memory: it is gone after a restart of the machine")
    return report


def _remote(tier: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    """Return where a remote tier's store is, whose size nobody here knows, and the memory that the tier takes."""
    try:
        options = RemoteConfig.parse(own_options(tier))
    except OptionError as error:
        problems.append(str(error))
        return {}
    return {"url": options.url, "memory": options.pending_bytes}


def _is_over_tcp(tier: dict[str, Any]) -> bool:
    """Return whether a tier holds blocks for peers in this server's memory; one without a word is where NIXL is not."""
    return tier.get("type") == TCP_TIER or (tier.get("type") == "p2p" and "secret_file" in tier)


def _over_tcp(tier: dict[str, Any], each: int, problems: list[str]) -> dict[str, Any]:
    """Return how many tokens a p2p tier over TCP holds for peers, and the memory that it takes."""
    try:
        options = TcpConfig.parse(own_options(tier))
    except OptionError as error:
        problems.append(str(error))
        return {}
    return {"tokens": options.bytes // each, "memory": options.bytes + options.pending_bytes}
