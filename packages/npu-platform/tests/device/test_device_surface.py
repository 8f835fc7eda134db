"""torch.npu offers what torch.cuda does; libraries of kernels reach the device through the launch table."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch

DEVICE = "npu"

NAMES = [
    "is_available",
    "device_count",
    "current_device",
    "set_device",
    "init",
    "is_initialized",
    "_is_in_bad_fork",
    "manual_seed",
    "manual_seed_all",
    "seed",
    "seed_all",
    "initial_seed",
    "get_rng_state",
    "set_rng_state",
    "get_rng_state_all",
    "set_rng_state_all",
    "get_amp_supported_dtype",
    "device",
    "Stream",
    "Event",
    "StreamContext",
    "stream",
    "current_stream",
    "default_stream",
    "set_stream",
    "synchronize",
    "get_device_name",
    "get_device_properties",
    "get_device_capability",
    "mem_get_info",
    "memory_allocated",
    "memory_reserved",
    "max_memory_allocated",
    "max_memory_reserved",
    "memory_stats",
    "reset_peak_memory_stats",
    "reset_accumulated_memory_stats",
    "empty_cache",
    "memory_snapshot",
    "set_per_process_memory_fraction",
    "MemPool",
    "use_mem_pool",
    "graph",
    "graph_pool_handle",
    "make_graphed_callables",
    "is_current_stream_capturing",
    "can_device_access_peer",
    "is_bf16_supported",
    "NPUGraph",
    "OutOfMemoryError",
    "ipc_collect",
    "set_num_threads",
    "get_num_threads",
    "memory_summary",
    "memory_stats_as_nested_dict",
    "get_per_process_memory_fraction",
    "utilization",
    "temperature",
    "power_draw",
    "clock_rate",
    "default_generators",
    "device_memory_used",
    "caching_allocator_alloc",
    "caching_allocator_delete",
    "get_allocator_backend",
    "get_arch_list",
    "get_stream_from_external",
    "host_memory_stats",
    "host_memory_stats_as_nested_dict",
    "reset_accumulated_host_memory_stats",
    "reset_peak_host_memory_stats",
    "is_tf32_supported",
    "profiler",
    "amp",
]


@pytest.mark.parametrize("name", NAMES)
def test_name_is_there(name: str) -> None:
    assert hasattr(torch.npu, name)


def test_accelerator_means_npu() -> None:
    assert torch.accelerator.current_accelerator() == torch.device("npu")
    assert torch.accelerator.is_available()
    assert torch.accelerator.device_count() == torch.npu.device_count()
    torch.accelerator.set_device_index(0)
    torch.accelerator.synchronize()
    torch.accelerator.empty_host_cache()
    assert torch.accelerator.memory_stats()["allocated_bytes.all.current"] == torch.npu.memory_allocated()
    assert torch.accelerator.get_memory_info() == torch.npu.mem_get_info()


def test_capability_lists_the_dtypes_that_a_tensor_can_have() -> None:
    dtypes = torch.accelerator.get_device_capability()["supported_dtypes"]
    assert dtypes >= {torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.complex64}
    assert not dtypes & {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
    assert all(torch.empty(2, dtype=dtype, device=DEVICE).dtype == dtype for dtype in dtypes)


def test_properties() -> None:
    properties = torch.npu.get_device_properties("npu:0")
    assert properties.name == torch.npu.get_device_name() == "Software NPU"
    assert properties.total_memory == torch.npu.mem_get_info()[1]
    assert torch.npu.is_initialized()


def test_memory_fraction_can_be_asked() -> None:
    assert torch.npu.get_per_process_memory_fraction() == 1
    torch.npu.set_per_process_memory_fraction(0.25)
    try:
        assert torch.npu.get_per_process_memory_fraction() == pytest.approx(0.25)
    finally:
        torch.npu.set_per_process_memory_fraction(1.0)


def test_nested_statistics_are_the_flat_ones() -> None:
    held = torch.ones(1000, device=DEVICE)
    nested, flat = torch.npu.memory_stats_as_nested_dict(), torch.npu.memory_stats()
    assert nested["allocated_bytes"]["all"]["current"] == flat["allocated_bytes.all.current"] >= held.nbytes
    assert nested["num_ooms"] == flat["num_ooms"]


def test_another_devices_name_is_refused() -> None:
    with pytest.raises(ValueError, match="expected an npu device, got cpu"):
        torch.npu.memory_allocated("cpu")


@pytest.mark.parametrize(
    "ask",
    [
        torch.npu.synchronize,
        torch.npu.get_device_name,
        torch.npu.get_device_capability,
        torch.npu.utilization,
        lambda index: torch.npu.can_device_access_peer(0, index),
        lambda index: torch.Generator(f"npu:{index}"),
    ],
)
def test_a_device_that_is_not_there_is_refused(ask: Callable[[int], object]) -> None:
    ask(0)
    with pytest.raises(RuntimeError, match="invalid device ordinal 9: 1 visible"):
        ask(9)


def test_random_state_comes_back() -> None:
    state = torch.npu.get_rng_state()
    first = torch.randn(4, device=DEVICE)
    torch.npu.set_rng_state(state)
    assert torch.equal(torch.randn(4, device=DEVICE), first)
    generator = torch.Generator(device=DEVICE).manual_seed(11)
    drawn = torch.rand(4, device=DEVICE, generator=generator)
    assert torch.equal(drawn.cpu(), torch.rand(4, generator=torch.Generator().manual_seed(11)))
    with torch.random.fork_rng(device_type="npu"):
        torch.randn(1, device=DEVICE)


def test_streams_are_current_where_they_were_made_so() -> None:
    other = torch.npu.Stream()
    default = torch.npu.default_stream()
    assert torch.npu.current_stream() == default
    with torch.npu.stream(other):
        assert torch.npu.current_stream() == other
        event = other.record_event()
        default.wait_event(event)
    assert torch.npu.current_stream() == default
    assert isinstance(torch.npu.current_stream(), torch.npu.Stream)
    other.synchronize()
    assert other.query()


def test_a_stream_of_another_device_leaves_the_current_device_when_it_goes(run_python) -> None:
    done = run_python(
        """
import torch
other = torch.npu.Stream("npu:1")
with torch.npu.stream(other):
    assert torch.npu.current_device() == 1 and torch.npu.current_stream() == other
assert torch.npu.current_device() == 0
assert torch.npu.current_stream(1) == torch.npu.default_stream(1)
try:
    with torch.npu.stream(other): 1 / 0
except ZeroDivisionError: pass
assert torch.npu.current_device() == 0
print("done")
""",
        NPU_SIMULATOR_DEVICES="2",
    )
    assert done.stdout == "done\n", done.stderr


def test_streams_have_an_id_that_other_code_can_hand_back() -> None:
    stream = torch.npu.Stream()
    assert torch.npu.get_stream_from_external(stream.npu_stream) == stream
    assert hash(torch.npu.get_stream_from_external(stream.npu_stream)) == hash(stream)
    assert torch.npu.Stream.priority_range() == (0, 0)
    assert stream.priority == 0
    with stream:
        assert torch.npu.current_stream() == stream


def test_events_without_timing_do_not_tell_the_time() -> None:
    timed, other = torch.npu.Event(enable_timing=True), torch.npu.Event()
    other.record()
    with pytest.raises(ValueError, match="recorded"):
        timed.elapsed_time(torch.npu.Event(enable_timing=True))
    timed.record()
    with pytest.raises(ValueError, match="enable_timing=True"):
        timed.elapsed_time(other)


def test_generators_of_all_devices() -> None:
    (generator,) = torch.npu.default_generators
    state = generator.clone_state()
    drawn = torch.rand(3, device=DEVICE)
    assert torch.equal(torch.rand(3, device=DEVICE, generator=state), drawn)
    states = torch.npu.get_rng_state_all()
    first = torch.rand(3, device=DEVICE)
    torch.npu.set_rng_state_all(states)
    assert torch.equal(torch.rand(3, device=DEVICE), first)
    torch.npu.manual_seed_all(9)
    assert torch.npu.initial_seed() == 9
    assert torch.npu.seed_all() == torch.npu.initial_seed() != 9


@pytest.mark.parametrize(("count", "grain"), [(1, 1), (7, 100), (10_000, 1), (100_003, 64)])
def test_parallel_loop_visits_each_index_once(count: int, grain: int) -> None:
    from npu_platform import _C

    before = torch.npu.get_num_threads()
    try:
        for threads in (1, 2, 4):
            torch.npu.set_num_threads(threads)
            for _ in range(20):
                assert _C._visit_in_parallel(count, grain) == (1, 1)
    finally:
        torch.npu.set_num_threads(before)
    with pytest.raises(RuntimeError, match="at least one thread"):
        torch.npu.set_num_threads(0)


RUN = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
BODY = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)


class LaunchTable(ctypes.Structure):
    _fields_ = (
        ("abi", ctypes.c_uint32),
        ("launch", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_char_p, RUN, ctypes.c_void_p, RUN)),
        ("parallel_for", ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, BODY, ctypes.c_void_p)),
        ("num_threads", ctypes.CFUNCTYPE(ctypes.c_int)),
        ("last_error", ctypes.CFUNCTYPE(ctypes.c_char_p)),
    )


def test_launch_table_runs_records_and_destroys() -> None:
    table = LaunchTable.from_address(torch.ops.npu.launch_table())
    assert table.abi == 1
    assert table.num_threads() == torch.npu.get_num_threads()
    calls: list[str] = []
    run = RUN(lambda _: calls.append("run"))
    destroy = RUN(lambda _: calls.append("destroy"))
    assert table.launch(0, b"mine", run, None, destroy) == 0
    assert calls == ["run", "destroy"]
    calls.clear()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        assert table.launch(0, b"mine", run, None, destroy) == 0
    assert calls == ["run"]
    graph.replay()
    graph.replay()
    assert calls == ["run"] * 3
    graph.reset()
    assert calls == ["run"] * 3 + ["destroy"]
