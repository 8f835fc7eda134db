"""AdapterWeights: which weights the adapters of requests have, by their files, so that KV blocks of others are others'.

vLLM finds blocks by an adapter's name and path. Files of that path may hold other weights tomorrow, or on another
host.

Note [Known as loaded]. A worker reads an adapter's files when it is told to, or else when it meets a new number
(``lora_int_id``), keeps what it has read for as long as it likes, and says nothing of it to the scheduler. So an
adapter's weights are those that its files held then. If the files change under that number, what a worker holds is
not known.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from vllm.logger import init_logger
from vllm.lora.utils import get_adapter_absolute_path

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

__all__ = ["AdapterWeights"]

logger = init_logger("vllm.npu_kvconnector")

_FILES = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
"""What vLLM reads of an adapter's folder."""

_Stamps = tuple[tuple[str, int, int, int, int], ...]
"""Of each file its name, inode, size, and the times of its last writing and change in ns."""


class _Known(NamedTuple):
    """Where an adapter lies, by its request and really, and what its files were when they were last read."""

    path: str
    folder: Path
    stamps: _Stamps
    digest: str


class AdapterWeights:
    """Digests of adapters' files, each read when the adapter is loaded; see Note [Known as loaded]."""

    def __init__(self) -> None:
        """Start without adapters."""
        self._known: dict[int, _Known] = {}
        self._lost: set[int] = set()

    def note_load(self, lora: LoRARequest) -> None:
        """Take note that workers are to read an adapter now, if they do not have it."""
        if lora.load_inplace or lora.lora_int_id not in self._known:
            self.note_removal(lora.lora_int_id)
            self.digest_of(lora)

    def note_removal(self, number: int) -> None:
        """Take note that workers are to forget an adapter."""
        self._known.pop(number, None)
        self._lost.discard(number)

    def digest_of(self, lora: LoRARequest) -> str | None:
        """Return a digest in hex of the weights that an adapter is computed with; None where these are not known."""
        known = self._known.get(lora.lora_int_id)
        try:
            found = _read(lora.lora_path, known)
        except OSError as error:
            self._warn(lora, f"cannot be read ({error})")
            return None
        if known is None or found.digest == known.digest or lora.load_inplace:
            self._known[lora.lora_int_id] = found
            self._lost.discard(lora.lora_int_id)
            return found.digest
        self._warn(lora, "have changed since it was loaded")
        return None

    def _warn(self, lora: LoRARequest, why: str) -> None:
        """Say once that an adapter's weights are not known."""
        if lora.lora_int_id not in self._lost:
            self._lost.add(lora.lora_int_id)
            logger.warning(
                "The files of the adapter %r in %s %s: its requests neither find nor store KV blocks until it is "
                "unloaded and loaded again (in Python: has a new lora_int_id)",
                lora.lora_name,
                lora.lora_path,
                why,
            )


def _read(path: str, known: _Known | None) -> _Known:
    """Return what an adapter's files are now, read again only if they are not the very files of before.

    Raises:
        OSError: the adapter is not there, or cannot be read.
    """
    folder = known.folder if known is not None and known.path == path else Path(get_adapter_absolute_path(path))
    files = [folder / name for name in _FILES if (folder / name).is_file()]
    if len(files) < 2:  # the configuration and the weights
        msg = f"no adapter in {folder}"
        raise FileNotFoundError(msg)
    stamps = tuple(_stamp(file) for file in files)
    if known is not None and (known.folder, known.stamps) == (folder, stamps):
        return known
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as content:
            digest.update(file.name.encode() + hashlib.file_digest(content, "sha256").digest())
    return _Known(path, folder, stamps, digest.hexdigest())


def _stamp(file: Path) -> tuple[str, int, int, int, int]:
    about = file.stat()
    return file.name, about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns
