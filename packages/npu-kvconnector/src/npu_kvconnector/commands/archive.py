"""`npu-kv export` and `import`: the blocks of a store in one tar file, each with its envelope, to take elsewhere.

A block is found on the other side by servers with the same model, layout, namespace and secret; the file holds no
secret. Blocks that are encrypted stay so.
"""

from __future__ import annotations

import errno
import io
import json
import os
import tarfile
import uuid
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from npu_kvconnector.commands.stores import settle
from npu_kvconnector.errors import IntegrityError, KVConnectorError, OptionError
from npu_kvconnector.tiers.durable import envelope
from npu_kvconnector.tiers.durable.disk_errors import way_out
from npu_kvconnector.tiers.durable.files import PAGE, open_file, page_buffer, sync_folder
from npu_kvconnector.tiers.durable.reader import StoreReader
from npu_kvconnector.tiers.durable.store import DurableStore

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["export_blocks", "import_blocks"]

_ABOUT = "npu-kv.json"
"""The first member: the realms, and the bytes of the largest payload."""
_LARGEST = 2**31  # bytes of a member


def export_blocks(folder: Path, target: Path, *, realm: str = "", quiet: bool = False) -> dict[str, Any]:
    """Write the blocks that are whole to a new tar file, which has its name once it is durable.

    Raises:
        OptionError: the file is there already, or cannot be made or written.
        StoreError: there is no store.
    """
    reader = StoreReader(folder)
    part = target.with_name(f".{target.name}-{uuid.uuid4().hex}")
    try:
        if target.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        report = _write_archive(reader, part, realm, quiet=quiet)
        part.rename(target)
        sync_folder(target.parent)
    except OSError as error:
        hint = way_out(error) or "; name a file that is not there yet, in a folder that you may write"
        msg = f"{target} cannot be made: {error.strerror}{hint}"
        raise OptionError(msg) from error
    finally:
        part.unlink(missing_ok=True)
        reader.close()
    return report


def _write_archive(reader: StoreReader, target: Path, realm: str, *, quiet: bool) -> dict[str, Any]:
    report = {"blocks": 0, "bytes": 0, "damaged": 0}
    chosen = [(name, entry) for name, entry in reader.index.entries() if entry.realm.hex().startswith(realm)]
    about = {
        "realms": {id_.hex(): text for id_, text in reader.index.realms().items()},
        "largest": max((entry.place.size for _, entry in chosen), default=1),
    }
    descriptor = open_file(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    with os.fdopen(descriptor, "wb") as file, tarfile.open(fileobj=file, mode="w|") as tar:
        _add(tar, _ABOUT, json.dumps(about).encode())
        for name, entry in tqdm(chosen, unit="block", disable=quiet or None):
            buffer = page_buffer(envelope.record_bytes(entry.place.size))
            if reader.read(name, buffer) is None:
                report["damaged"] += 1
                continue
            record = bytes(buffer[: PAGE + entry.place.size])
            _add(tar, f"blocks/{name.hex()}", record)
            report["blocks"] += 1
            report["bytes"] += len(record)
        tar.close()  # which writes the end
        file.flush()
        os.fsync(descriptor)
    return report


def import_blocks(source: Path, folder: Path, *, quota: int, quiet: bool = False) -> dict[str, Any]:
    """Store the blocks of a tar file; those that are damaged or no blocks are left out and counted.

    Raises:
        OptionError: the file cannot be read, or the folder or the quota cannot be used.
        StoreError: a server writes the store, or a block could not be made durable.
    """
    report = {"blocks": 0, "bytes": 0, "there_already": 0, "damaged": 0}
    try:
        size = source.stat().st_size
        with (
            tqdm(total=size, unit="B", unit_scale=True, disable=quiet or None) as bar,
            tarfile.open(source, mode="r|") as tar,
        ):
            realms, largest = _read_about(tar)
            store = DurableStore(folder, quota=quota, block_bytes=largest)
            try:
                for realm, about in realms.items():
                    store.describe_realm(realm, about)
                while (member := tar.next()) is not None:
                    _take(store, _content(tar, member), report)
                    bar.update(member.size)
                settle(store)
            finally:
                report["evicted"] = store.evicted
                store.close()
    except (OSError, tarfile.TarError, ArithmeticError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, KVConnectorError):
            raise
        msg = f"{source} cannot be read as a file that `npu-kv export` wrote: {error}"
        raise OptionError(msg) from error
    return report


def _read_about(tar: tarfile.TarFile) -> tuple[dict[bytes, Any], int]:
    first = tar.next()
    if first is None or first.name != _ABOUT:
        msg = f"its first member is not {_ABOUT}"
        raise ValueError(msg)
    about = json.loads(_content(tar, first))
    return {bytes.fromhex(realm): text for realm, text in about["realms"].items()}, min(int(about["largest"]), _LARGEST)


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    """Return the bytes of a member; none of a link, a folder, or what is too large."""
    file = tar.extractfile(member) if member.isreg() and member.size <= _LARGEST else None
    return b"" if file is None else file.read()


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(data), 0o600
    tar.addfile(member, io.BytesIO(data))


def _take(store: DurableStore, data: bytes, report: dict[str, Any]) -> None:
    """Store one member if it is a block."""
    view = memoryview(data)
    try:
        header = envelope.verify(view[:PAGE], view[PAGE:])
        is_new = store.put(header.name, header.realm, view[PAGE:], block_bytes=header.block_bytes, codec=header.codec)
    except IntegrityError:
        report["damaged"] += 1
        return
    report["blocks" if is_new else "there_already"] += 1
    report["bytes"] += len(data)
