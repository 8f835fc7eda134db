"""npu-kv on stores: what each command reports, and the exit codes that scripts rely on."""

from __future__ import annotations

import errno
import json
import os
import random
import tarfile
from typing import TYPE_CHECKING, Any

import lmdb
import pytest

from npu_kvconnector.cli import main
from npu_kvconnector.commands.doctor import bytes_per_token
from npu_kvconnector.errors import OptionError
from npu_kvconnector.tiers.durable.index import Batch, Index
from npu_kvconnector.tiers.durable.segments import SegmentWriter
from npu_kvconnector.tiers.durable.store import DurableStore

if TYPE_CHECKING:
    from pathlib import Path

REALM, OTHER = b"a realm of some.", b"the other realm."
QUOTA = 16 * 2**20
Run = Any


def block(number: int) -> bytes:
    return random.Random(number).randbytes(10_000)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a store of 30 blocks, ten of them of another realm."""
    store = DurableStore(tmp_path / "store", quota=QUOTA, block_bytes=10_000)
    store.describe_realm(REALM, {"model": "llama"})
    for number in range(30):
        store.put(number.to_bytes(32, "big"), REALM if number < 20 else OTHER, memoryview(block(number)))
    store.close()
    return tmp_path / "store"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: object) -> tuple[int, dict[str, Any]]:
        code = main([*(str(each) for each in arguments), "--json"])
        out = capsys.readouterr().out
        return code, json.loads(out) if out else {}

    return call


def damage(folder: Path) -> None:
    """Change a byte of the first block."""
    segment = min((folder / "segments").glob("*.seg"))
    data = bytearray(segment.read_bytes())
    data[2 * 4096 + 7] ^= 1
    segment.write_bytes(data)


def test_ls_lists_blocks(folder: Path, run: Run) -> None:
    code, report = run("ls", folder, "--limit", 5, "--realm", REALM.hex()[:6])
    assert code == 0
    assert report["count"] == 20
    assert len(report["blocks"]) == 5
    assert report["blocks"][3]["name"] == f"{3:064x}"
    assert report["blocks"][3]["bytes"] == 10_000


def test_stat_counts_by_realm(folder: Path, run: Run) -> None:
    code, report = run("stat", folder)
    assert code == 0
    assert report["blocks"] == 30
    assert report["realms"][REALM.hex()] == {"blocks": 20, "bytes": 20 * 16384, "stands_for": {"model": "llama"}}
    assert report["realms"][OTHER.hex()]["blocks"] == 10
    assert report["bytes"]["segments"] >= 30 * 16384


def test_verify_and_scrub_find_damage(folder: Path, run: Run) -> None:
    assert run("verify", folder)[0] == 0
    damage(folder)
    for _ in range(2):  # verify changes nothing
        code, report = run("verify", folder)
        assert code == 1
        assert [each["name"] for each in report["damaged"]] == [f"{0:064x}"]
    code, report = run("scrub", folder)
    assert (code, report["given_up"]) == (1, 1)
    assert run("scrub", folder)[0] == 0
    code, report = run("verify", folder)
    assert (code, report["blocks"]) == (0, 29)


def test_gc_removes_what_is_named(folder: Path, run: Run) -> None:
    assert run("gc", folder)[0] == 2
    assert run("gc", folder, "--older-than", "1h")[1]["removed"] == 0
    assert run("gc", folder, "--realm", OTHER.hex())[1]["removed"] == 10
    assert run("stat", folder)[1]["blocks"] == 20
    assert not run("gc", folder, "--older-than", "1h")[1]["bytes_given_back"]
    code, report = run("gc", folder, "--older-than", "0s")
    assert (code, report["removed"], report["bytes"]) == (0, 20, 0)
    assert report["bytes_given_back"] > 20 * 10_000
    assert not list((folder / "segments").iterdir())


def test_gc_removes_the_coldest(folder: Path, run: Run) -> None:
    code, report = run("gc", folder, "--bytes", 0)
    assert (code, report["removed"], report["bytes"]) == (0, 30, 0)


@pytest.mark.parametrize("failing", ["index", "segment"])
@pytest.mark.parametrize("command", ["import", "scrub"])
def test_what_was_not_made_durable_is_no_success(
    command: str, failing: str, folder: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (command, failing) == ("scrub", "segment"):
        pytest.skip("nothing is written to a segment")
    assert run("export", folder, tmp_path / "blocks.tar")[0] == 0
    commit = Index.commit

    def fail(index: Index, batch: Batch) -> None:
        if batch.puts or batch.forgets:
            raise lmdb.CorruptedError
        commit(index, batch)

    def fail_sync(_: SegmentWriter) -> None:
        raise OSError(errno.EIO, "input/output error")

    damage(folder)
    with monkeypatch.context() as patch:
        if failing == "index":
            patch.setattr(Index, "commit", fail)
        else:
            patch.setattr(SegmentWriter, "sync", fail_sync)
        if command == "scrub":
            assert run("scrub", folder)[0] == 2
        else:
            assert run("import", tmp_path / "target", tmp_path / "blocks.tar", "--bytes", "16MiB")[0] == 2


def test_an_export_that_fails_leaves_no_file(
    folder: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        code, report = run("export", folder, tmp_path / "blocks.tar")
    assert code == 2
    assert "make room" in report["error"]
    assert [path.name for path in tmp_path.iterdir()] == ["store"]
    assert run("export", folder, tmp_path / "blocks.tar")[0] == 0


def test_blocks_travel_in_a_file(folder: Path, run: Run, tmp_path: Path) -> None:
    damage(folder)
    archive, target = tmp_path / "blocks.tar", tmp_path / "target"
    code, report = run("export", folder, archive)
    assert (code, report["blocks"], report["damaged"]) == (1, 29, 1)
    assert archive.stat().st_mode & 0o777 == 0o600
    assert run("export", folder, archive)[0] == 2  # never over a file
    code, report = run("import", target, archive, "--bytes", "16MiB")
    assert (code, report["blocks"]) == (0, 29)
    assert run("import", target, archive, "--bytes", "16MiB")[1]["there_already"] == 29
    assert run("stat", target)[1]["realms"][REALM.hex()]["stands_for"] == {"model": "llama"}
    store = DurableStore(target, quota=QUOTA, block_bytes=10_000)
    read = store.read((7).to_bytes(32, "big"))
    assert read is not None
    assert bytes(read.payload) == block(7)
    store.close()


def test_a_file_that_is_no_archive_is_refused(run: Run, tmp_path: Path) -> None:
    (tmp_path / "noise").write_bytes(random.Random(1).randbytes(5000))
    assert run("import", tmp_path / "store", tmp_path / "noise", "--bytes", "16MiB")[0] == 2
    (tmp_path / "about").write_text('{"realms": {}, "largest": 100}')
    (tmp_path / "endless").write_text('{"realms": {}, "largest": Infinity}')
    with tarfile.open(tmp_path / "endless.tar", "w") as tar:
        tar.add(tmp_path / "endless", "npu-kv.json")
    assert run("import", tmp_path / "store", tmp_path / "endless.tar", "--bytes", "16MiB")[0] == 2
    for path in (tmp_path / "endless", tmp_path / "endless.tar"):
        path.unlink()
    with tarfile.open(tmp_path / "strange.tar", "w") as tar:
        tar.add(tmp_path / "about", "npu-kv.json")
        tar.add(tmp_path / "noise", "../../noise")
    code, report = run("import", tmp_path / "store", tmp_path / "strange.tar", "--bytes", "16MiB")
    assert (code, report["damaged"], report["blocks"]) == (1, 1, 0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["about", "noise", "store", "strange.tar"]


@pytest.mark.parametrize("command", ["ls", "stat", "verify", "scrub", "gc"])
def test_what_is_no_store_ends_with_2(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = ["--bytes", "0"] if command == "gc" else []
    assert main([command, str(tmp_path), *more]) == 2
    assert "holds no store" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_store_in_use_is_not_scrubbed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from npu_kvconnector.tiers.durable.lock import lock_store

    lock = lock_store(folder)
    assert main(["scrub", str(folder)]) == 2
    assert "another process writes" in capsys.readouterr().err
    os.close(lock)


def test_bench_measures_and_cleans_up(run: Run, tmp_path: Path) -> None:
    code, report = run("bench", tmp_path, "--total", "4MiB")
    assert code == 0
    assert [row["block_bytes"] for row in report["sizes"]] == [2**16, 2**18, 2**20, 2**22]
    assert all(row[name] > 0 for row in report["sizes"] for name in ("disk_write", "store_write", "store_read"))
    assert not list(tmp_path.iterdir())


def test_more_than_the_disk_has_is_not_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", str(tmp_path), "--total", "99999GiB"]) == 2
    assert "lower --total" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "arguments",
    [["ls", "x", "--limit", "-3"], ["ls", "x", "--realm", "xyz"], ["stress", "x", "--rounds", "-1"]],
)
def test_arguments_out_of_range_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert arguments[2] in capsys.readouterr().err


def test_json_says_what_went_wrong(run: Run, folder: Path) -> None:
    code, report = run("gc", folder)
    assert (code, list(report)) == (2, ["error"])


def test_stress_refuses_what_is_there(run: Run, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    assert run("stress", tmp_path, "--rounds", 1)[0] == 2
    assert (tmp_path / "mine").exists()


QWEN = {"num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
DEEPSEEK = {"num_hidden_layers": 27, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "torch_dtype": "bfloat16"}
MIXED = QWEN | {"num_hidden_layers": 4, "layer_types": ["linear_attention"] * 3 + ["full_attention"]}


@pytest.mark.parametrize(
    ("settings", "dtype", "size"),
    [
        (QWEN, "auto", 2 * 28 * 8 * 128 * 2),
        (QWEN, "fp8", 2 * 28 * 8 * 128),
        (QWEN, "fp8_e5m2", 2 * 28 * 8 * 128),
        (QWEN, "fp8_per_token_head", 2 * 28 * 8 * (128 + 4)),
        (QWEN, "int8_per_token_head", 2 * 28 * 8 * (128 + 4)),
        ({"text_config": QWEN | {"dtype": "float32"}}, "auto", 2 * 28 * 8 * 128 * 4),
        (DEEPSEEK, "auto", 27 * 576 * 2),
        (MIXED, "auto", 2 * 8 * 128 * 2),
    ],
)
def test_bytes_of_a_token(settings: dict[str, Any], dtype: str, size: int) -> None:
    assert bytes_per_token(settings, dtype) == size


def test_settings_that_say_nothing_are_refused() -> None:
    with pytest.raises(OptionError, match="num_hidden_layers"):
        bytes_per_token({})


def test_doctor_sizes_the_tiers(run: Run, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    tier = {"type": "durable", "path": str(tmp_path / "store"), "bytes": "1GiB"}
    config = {"cpu_bytes_to_use": "64MiB", "secondary_tiers": [tier]}
    code, report = run("doctor", "--model", tmp_path, "--config", json.dumps(config))
    assert code == 0, report
    assert report["kv_bytes_per_token"] == 114_688
    assert report["host"]["tokens"] == 64 * 2**20 // 114_688
    assert report["durable"][0]["tokens"] == 2**30 // 114_688
    config["cpu_bytes_to_use"] = "1000TiB"
    tier["bytes"] = "1000TiB"
    code, report = run("doctor", "--model", tmp_path, "--config", json.dumps(config))
    assert code == 1
    assert len(report["problems"]) == 2
    assert run("doctor", "--model", tmp_path / "none")[0] == 1


@pytest.mark.parametrize(
    ("tier", "said"),
    [
        ({"type": "remote", "url": 5}, "url must be a text"),
        ({"type": "durable", "path": "/x", "bytes": 1, "eviction_policy": ["lru"]}, "eviction_policy must be a text"),
        ({"type": "p2p_tcp", "secret_file": "secret", "peers": 5}, "peers must be a list"),
    ],
)
def test_doctor_says_what_is_wrong_with_an_option(tier: dict[str, Any], said: str, run: Run, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    config = {"cpu_bytes_to_use": "64MiB", "secondary_tiers": [tier]}
    code, report = run("doctor", "--model", tmp_path, "--config", json.dumps(config))
    assert code == 1
    assert said in report["problems"][0]


def test_doctor_counts_what_tiers_take_of_the_memory(run: Run, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    peers = {"type": "p2p", "transport": "tcp", "secret_file": "secret", "bytes": "1GiB", "guard": {"load_seconds": 60}}
    store = {"type": "remote", "url": "s3://bucket/kv", "pending_bytes": "64MiB"}
    config: dict[str, Any] = {"cpu_bytes_to_use": "64MiB", "secondary_tiers": [peers, store]}
    code, report = run("doctor", "--model", tmp_path, "--config", json.dumps(config))
    assert code == 0, report
    assert report["p2p_tcp"] == [{"tokens": 2**30 // 114_688, "memory": 2**30 + 64 * 2**20}]
    assert report["remote"] == [{"url": "s3://bucket/kv", "memory": 64 * 2**20}]
    peers["bytes"], store["pending_byte"] = "1000TiB", 1
    code, report = run("doctor", "--model", tmp_path, "--config", json.dumps(config))
    assert code == 1
    assert "pending_bytes" in report["problems"][0]
    assert "bytes of the tiers behind it, is more than" in report["problems"][1]


def test_doctor_says_what_a_start_would_say_of_a_tier_and_says_it_once(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    wrong = [{"type": "durable", "path": str(tmp_path / "store"), "byte": 1}, {"type": "durabel"}]
    config = {"cpu_bytes_to_use": "64MiB", "secondary_tiers": wrong}
    code, report = run("doctor", "--model", tmp_path, "--config", json.dumps(config))
    assert code == 1
    first, second = report["problems"]
    assert "did you mean 'bytes'" in first
    assert second.startswith("tier 2, durabel: Unknown secondary tier type")
