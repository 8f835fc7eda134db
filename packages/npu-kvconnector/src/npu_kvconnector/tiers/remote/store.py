"""What the tier asks of a store: find, load and save sealed records by name, in one event loop."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from npu_kvconnector.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    from typing_extensions import Buffer

    from npu_kvconnector.tiers.remote.config import RemoteConfig

__all__ = ["READS", "Record", "Store", "all_of", "open_store"]

READS = 4
"""Of a load at a time, each of several MiB: what was read is taken before more is asked for, so that little waits."""


class Record(NamedTuple):
    """A block to save: the name, the header of its envelope and its payload, which is not copied before it is sent."""

    name: bytes
    header: bytes
    payload: Buffer


class Store(Protocol):
    """A store of records; all methods are for one event loop, and raise StoreError when the store fails."""

    async def start(self) -> None:
        """Begin what runs beside requests."""

    async def find(self, names: Sequence[bytes]) -> list[bool]:
        """Say for each name whether there is a record."""
        ...

    async def load(self, names: Sequence[bytes], take: Callable[[int, Buffer], Awaitable[None]]) -> None:
        """Hand each record that is there to ``take``, with the place of its name, as it comes."""

    async def save(self, records: Sequence[Record]) -> None:
        """Return when all records are kept."""

    async def forget(self, name: bytes) -> None:
        """Drop a record that is no good, so that it can be saved anew."""

    async def close(self) -> None:
        """End connections and what runs beside requests."""


def open_store(config: RemoteConfig, realm: bytes, record_bytes: int) -> Store:
    """Return the store of the url, for records of at most ``record_bytes`` of this realm (its 16 bytes).

    Raises:
        OptionError: the client library is not installed, refuses the options, or a file that they name cannot be read.
    """
    if config.ca_file is not None:
        try:
            Path(config.ca_file).read_bytes()
        except OSError as error:
            msg = f"ca_file={config.ca_file} cannot be read: {error.strerror}; name a file of certificates in PEM"
            raise OptionError(msg) from error
    try:
        if config.is_key_value:
            from npu_kvconnector.tiers.remote.valkey_store import ValkeyStore

            return ValkeyStore(config, realm, record_bytes)
        from npu_kvconnector.tiers.remote.objects import ObjectStore

        return ObjectStore(config, realm, record_bytes)
    except ImportError as error:
        msg = f"the remote tier needs {error.name}: install npu-kvconnector[remote]"
        raise OptionError(msg) from error


async def all_of(work: Iterable[Awaitable[Any]]) -> None:
    """Await everything, also where something fails, and raise the first error then: nothing is left running."""
    for result in await asyncio.gather(*work, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result
