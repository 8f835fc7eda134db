"""The index of a store: readers beside its writer."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

from npu_kvconnector.tiers.durable.index import Batch, Entry, Index
from npu_kvconnector.tiers.durable.segments import Place
from tests.support.durable_store import REALM, name

if TYPE_CHECKING:
    from pathlib import Path

MIB = 2**20
READER = """
import sys
from pathlib import Path
from npu_kvconnector.tiers.durable.index import Index
index = Index(Path(sys.argv[1]), readonly=True)
print(len(index), flush=True)
sys.stdin.readline()
print(len(index), index.get(bytes.fromhex(sys.argv[2])) is not None)
"""


def entries(*numbers: int) -> dict[bytes, Entry]:
    """Return entries in places of their own."""
    return {name(each): Entry(Place(1, 4096 * each, 100), 100, 0, REALM, 0.0, each, each) for each in numbers}


def test_a_reader_finds_what_the_index_grows_by(tmp_path: Path) -> None:
    """Far beyond what it took when the reader opened it."""
    writer = Index(tmp_path / "index", map_size=16 * MIB)
    command = [sys.executable, "-c", READER, str(tmp_path / "index"), name(24_999).hex()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "0\n"
        writer.commit(Batch(puts=entries(*range(25_000))))
        assert (tmp_path / "index" / "data.mdb").stat().st_size > 4 * MIB
        assert reader.communicate("\n", timeout=60)[0] == "25000 True\n"
    writer.close()
