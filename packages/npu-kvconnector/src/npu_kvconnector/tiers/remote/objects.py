"""ObjectStore: packs of records in S3, Azure, GCS or a folder, through obstore.

Note [Finding blocks]. An object store has no index, and asking for each block would be a request a block. So servers
keep the tables of all packs in memory: their own as they write them, others' by listing the realm's folder every few
seconds. Names of packs begin with the time, so that a listing goes on a little before where the last one ended; now and
then it covers everything, which also finds the packs of servers whose clocks are late, and those that are gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import obstore
from obstore.exceptions import BaseError, NotFoundError, PermissionDeniedError, UnauthenticatedError
from obstore.store import LocalStore, MemoryStore, from_url
from vllm.logger import init_logger

from npu_kvconnector.errors import IntegrityError, OptionError, StoreError
from npu_kvconnector.tiers.remote.hedging import Hedge
from npu_kvconnector.tiers.remote.pack import TABLE_BYTES, read_table
from npu_kvconnector.tiers.remote.pack_index import PackIndex
from npu_kvconnector.tiers.remote.pack_writer import PackWriter
from npu_kvconnector.tiers.remote.store import READS, all_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from typing_extensions import Buffer

    from npu_kvconnector.tiers.remote.config import RemoteConfig
    from npu_kvconnector.tiers.remote.pack import Place
    from npu_kvconnector.tiers.remote.store import Record

__all__ = ["ObjectStore"]

logger = init_logger("vllm.npu_kvconnector")

_OVERLAP = 600.0
"""Seconds of names that a listing repeats: by so much may the clocks of servers differ."""
_COMPLETE_EVERY = 120
"""Listings from one that covers everything to the next."""
_TABLES_AT_A_TIME = 8
_ABSENT = ("NoSuchBucket", "ContainerNotFound")
"""In what a store says of a listing, which obstore has no error of its own for."""
_NO_PLACE = "see whether the bucket or folder of url exists"
_WAYS_OUT: dict[tuple[type[Exception], ...], str] = {
    (NotFoundError, FileNotFoundError): _NO_PLACE,
    (PermissionDeniedError, UnauthenticatedError, PermissionError): "give it credentials that may read and write",
    (Exception,): "see whether it can be reached, endpoint and region in store_options, and that credentials are set",
}
_RETRIES = {"max_retries": 2, "backoff": {"init_backoff": timedelta(milliseconds=50)}}


class ObjectStore:
    """A realm's folder in an object store."""

    def __init__(self, config: RemoteConfig, realm: bytes, record_bytes: int) -> None:
        """Open the store without a request.

        Raises:
            OptionError: obstore refuses the url or the options.
        """
        self._config = config
        self._folder = realm.hex()
        self._record_bytes = record_bytes
        self._store = _open(config)
        self._hedge = Hedge(enabled=config.hedge)
        self._index = PackIndex(config.index_blocks)
        self._writer = PackWriter(config.pack_bytes, self._write)
        self._requests = asyncio.Semaphore(config.concurrency)
        self._looking: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to look for packs."""
        self._looking = asyncio.create_task(self._look())

    async def find(self, names: Sequence[bytes]) -> list[bool]:
        """Say for each name whether a known pack holds it; no request."""
        return [name in self._index for name in names]

    async def load(self, names: Sequence[bytes], take: Callable[[int, Buffer], Awaitable[None]]) -> None:
        """Read the records that are there, neighbours in one request, and hand them on."""
        packs: dict[str, list[tuple[int, Place]]] = {}
        for number, name in enumerate(names):
            found = self._index.find(name)
            if found is not None:
                packs.setdefault(found[0], []).append((number, found[1]))
        reads = asyncio.Semaphore(READS)

        async def load(pack: str, wanted: list[tuple[int, Place]]) -> None:
            async with reads:
                await self._load_from(pack, wanted, take)

        await all_of(load(pack, wanted) for pack, wanted in packs.items())

    async def save(self, records: Sequence[Record]) -> None:
        """Return when the packs that the records went into are written."""
        await all_of(self._writer.add(record) for record in records)

    async def forget(self, name: bytes) -> None:
        """Leave a record out; the object stays, for others may be good."""
        self._index.forget(name)

    async def close(self) -> None:
        """Stop looking; packs that are not written yet are given up."""
        self._writer.close()
        if self._looking is not None:
            self._looking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._looking

    async def _load_from(
        self, pack: str, wanted: list[tuple[int, Place]], take: Callable[[int, Buffer], Awaitable[None]]
    ) -> None:
        starts = [place.offset for _, place in wanted]
        ends = [place.offset + place.length for _, place in wanted]

        async def request() -> Sequence[Buffer]:
            async with self._requests:
                return await obstore.get_ranges_async(self._store, pack, starts=starts, ends=ends)

        try:
            records = await self._hedge.read(request)
        except FileNotFoundError:
            self._index.drop(pack)  # a lifecycle rule has taken it
            return
        except (BaseError, OSError, ValueError) as error:
            raise self._failure(error, "read a pack") from None
        for (number, _), record in zip(wanted, records, strict=True):
            await take(number, record)

    async def _write(self, content: bytes, places: list[Place]) -> None:
        pack = f"{self._folder}/{_time(time.time())}-{os.urandom(8).hex()}.pack"
        try:
            async with self._requests:
                await obstore.put_async(self._store, pack, content, use_multipart=False)
        except (BaseError, OSError, ValueError) as error:
            raise self._failure(error, "write a pack") from None
        self._index.add(pack, places)

    async def _look(self) -> None:
        """Keep the index up to date until cancelled; a store that fails is told once, and asked again."""
        listings, well = 0, True
        while True:
            try:
                await self._list(complete=listings % _COMPLETE_EVERY == 0)
                listings += 1
                well = True
            except (BaseError, OSError, ValueError) as error:
                if well:
                    logger.warning("The remote tier finds no blocks of other servers: %s", self._failure(error, "list"))
                well = False
            await asyncio.sleep(self._config.refresh)

    async def _list(self, *, complete: bool) -> None:
        newest = self._index.newest
        offset = None if complete or newest is None else f"{self._folder}/{_time(_seconds(newest) - _OVERLAP)}"
        there: set[str] = set()
        async for chunk in obstore.list(self._store, f"{self._folder}/", offset=offset, chunk_size=1000):
            there.update(meta["path"] for meta in chunk)
            new = [meta for meta in chunk if not self._index.knows(meta["path"])]
            for first in range(0, len(new), _TABLES_AT_A_TIME):
                some = new[first : first + _TABLES_AT_A_TIME]
                await all_of(self._read_table(meta["path"], meta["size"]) for meta in some)
        if complete:
            for pack in self._index.packs():
                if pack not in there and _seconds(pack) < time.time() - _OVERLAP:
                    self._index.drop(pack)

    async def _read_table(self, pack: str, size: int) -> None:
        try:
            async with self._requests:
                head = await obstore.get_range_async(self._store, pack, start=0, end=min(TABLE_BYTES, size))
            places = read_table(head.to_bytes(), size)
        except FileNotFoundError:
            return
        except IntegrityError as error:
            logger.warning("The remote tier leaves %s alone: %s", pack, error)
            places = []
        self._index.add(pack, [place for place in places if place.length <= self._record_bytes])

    def _failure(self, error: Exception, what: str) -> StoreError:
        """Return an error without the details, which may hold addresses that are signed."""
        hint = next(hint for kinds, hint in _WAYS_OUT.items() if isinstance(error, kinds))
        if any(word in str(error) for word in _ABSENT):
            hint = _NO_PLACE
        where = self._config.url.partition("?")[0]
        return StoreError(f"the object store of url={where} did not {what} ({type(error).__name__}): {hint}")


def _time(seconds: float) -> str:
    return f"{max(int(seconds * 1000), 0):012x}"


def _seconds(pack: str) -> float:
    try:
        return int(pack.rpartition("/")[2][:12], 16) / 1000
    except ValueError:
        return 0.0


def _open(config: RemoteConfig) -> Any:
    seconds = timedelta(seconds=config.deadline)
    allow_http = config.insecure or any("http:" in str(value) for value in config.store_options.values())
    client: dict[str, Any] = {"timeout": seconds, "connect_timeout": seconds, "allow_http": allow_http}
    if config.ca_file is not None:
        client["root_certificate"] = Path(config.ca_file).read_bytes()
    scheme = config.url.partition("://")[0]
    try:
        if scheme == "memory":
            return MemoryStore()
        if scheme == "file":
            folder = Path(config.url.removeprefix("file://"))
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            return LocalStore(folder)
        options: dict[str, Any] = {"config": config.store_options, "client_options": client, "retry_config": _RETRIES}
        if config.credentials == "boto3":
            from obstore.auth.boto3 import Boto3CredentialProvider

            options["credential_provider"] = Boto3CredentialProvider()
        return from_url(config.url, **options)
    except (BaseError, ValueError, TypeError, OSError) as error:
        reason, _, _ = str(error).partition("\n")  # what follows is for obstore's developers
        hint = ": set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY" if "Account must be" in reason else ""
        where = config.url.partition("?")[0]
        msg = f"the object store of the remote tier (url={where}) cannot be opened: {reason}{hint}"
        raise OptionError(msg) from None
