"""Graphs: captured once, replayed with new inputs, refused where a replay would lie, gone when dropped."""

from __future__ import annotations

import copy
import gc
import re
import threading
import time

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

DEVICE = "npu"
MIB = 1 << 20
RECORDED: list[torch.Event] = []  # before any capture

OPS = {
    "linear": lambda x: F.linear(x, x[:8]),
    "copy": lambda x: torch.empty_like(x).copy_(x),
    "copy with conversion": lambda x: x.to(torch.bfloat16),
    "zero_": lambda x: torch.cat([x, torch.empty_like(x).zero_()]),
    "fill_": lambda x: x + torch.full_like(x, 2),
    "in place": lambda x: x.clone().add_(1).mul_(x),
    "out argument": lambda x: torch.add(x, 1, out=torch.empty_like(x)),
    "index_put_": lambda x: x.clone().index_put_((x[:, 0].argsort(),), x[:, :1]),
    "sort": lambda x: x.sort(-1)[0],
    "topk": lambda x: x.topk(3)[1],
    "cat": lambda x: torch.cat([x, x.flip(0)], 1),
    "view of the input": lambda x: x[::2, 1:] * 2,
    "attention": lambda x: F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None]),
    "convolution": lambda x: F.conv1d(x[None], x[:4, :8, None].expand(4, 8, 3)),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "foreach": lambda x: torch.stack(torch._foreach_mul(list(x), 2.0)),
    "embedding": lambda x: F.embedding(x[:, 0].argsort(), x),
    "cumsum": lambda x: x.cumsum(0),
    "masked_fill": lambda x: x.masked_fill(x > 0, -1.0),
    "argmax": lambda x: x.argmax(-1),
}


def captured(function, *arguments):
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        result = function(*arguments)
    return graph, result


@pytest.mark.parametrize("name", OPS)
def test_replay_with_new_inputs_gives_what_eager_gives(name: str) -> None:
    x = torch.randn(8, 16, device=DEVICE)
    graph, result = captured(OPS[name], x)
    for _ in range(2):
        x.copy_(torch.randn(8, 16))
        graph.replay()
        assert torch.equal(result, OPS[name](x))


def test_torchs_own_graph_class_records_the_same() -> None:
    x = torch.zeros(4, device=DEVICE)
    graph = torch.accelerator.Graph()
    with torch.Stream(device=DEVICE), graph:
        x += 1
    before = x.clone()
    graph.replay()
    graph.replay()
    assert torch.equal(x, before + 2)


@pytest.mark.parametrize(
    "grow",
    [
        lambda y: y.resize_(8192),
        lambda y: y.untyped_storage().resize_(1 << 16),
        lambda y: y.set_(y.untyped_storage(), 0, (8192,), (1,)),
    ],
    ids=["resize_", "storage", "set_"],
)
def test_what_a_tensor_held_when_it_grew_is_copied_at_each_replay(grow) -> None:
    x = torch.ones(8, device=DEVICE)

    def step() -> torch.Tensor:
        y = x + 1
        grow(y)
        return y[:8] * 2

    graph, result = captured(step)
    x.fill_(5)
    graph.replay()
    assert result.tolist() == [12.0] * 8


def test_a_tensor_without_data_grows_within_a_graph() -> None:
    x, target = torch.ones(8, device=DEVICE), torch.empty(0, device=DEVICE)
    graph, _ = captured(lambda: target.resize_(8).copy_(x))
    x.fill_(5)
    graph.replay()
    assert target.tolist() == [5.0] * 8


def test_indices_are_read_at_each_replay() -> None:
    table, places = torch.arange(8.0, device=DEVICE) * 10, torch.tensor([1, 2], device=DEVICE)
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        rows = table[places]
    places.copy_(torch.tensor([7, 0]))
    graph.replay()
    assert rows.tolist() == [70, 0]


@pytest.fixture(scope="module", autouse=True)
def recorded_events() -> None:
    RECORDED[:] = [torch.npu.current_stream().record_event(torch.npu.Event(enable_timing=True)) for _ in range(2)]


def on_stream(stream: torch.Stream, function):
    with torch.npu.stream(stream):
        return function()


@pytest.mark.parametrize(
    ("operation", "name"),
    [
        (lambda x: x.sum().item(), "_local_scalar_dense"),
        (lambda x: x.cpu(), "_copy_from"),
        (lambda x: x.copy_(torch.randn(4)), "_copy_from"),
        (lambda _: torch.npu.synchronize(), "synchronize"),
        (lambda _: torch.npu.current_stream().synchronize(), "synchronize"),
        (lambda x: x.nonzero(), "aten::nonzero"),
        (lambda x: torch.equal(x, x), "aten::equal"),
        (lambda x: x[x > 0], "aten::(nonzero|index)"),
        (lambda x: x.resize_(4096), "resize_"),
        (lambda x: x.untyped_storage().resize_(1 << 16), "resize_"),
        (lambda _: torch.npu.current_stream().query(), "query of a stream"),
        (lambda _: RECORDED[0].query(), "query of an event"),
        (lambda _: RECORDED[0].elapsed_time(RECORDED[1]), "query of an event"),
        (lambda _: RECORDED[0].wait(), "waiting for work outside of the capture"),
        (lambda x: on_stream(torch.npu.Stream(), x.neg), r"aten::neg on a stream that is not part of the capture"),
    ],
)
def test_what_a_replay_could_not_repeat_is_refused_by_name(operation, name: str) -> None:
    x = torch.ones(4, device=DEVICE)
    graph = torch.npu.NPUGraph()
    with pytest.raises(RuntimeError, match=rf"{name}.*not permitted while a graph is captured"), torch.npu.graph(graph):
        operation(x)
    assert not torch.npu.is_current_stream_capturing()
    with pytest.raises(RuntimeError, match="cannot be replayed: its capture met"):
        graph.replay()
    graph.reset()
    with torch.npu.graph(graph):
        y = x + 1
    graph.replay()
    assert y.tolist() == [2, 2, 2, 2]


def test_streams_that_events_fork_and_join_are_part_of_the_graph() -> None:
    x, side, other = torch.ones(4, device=DEVICE), torch.npu.Stream(), torch.npu.Stream()
    main, graph = torch.npu.current_stream(), torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        doubled = x * 2
        side.wait_stream(main)
        with torch.npu.stream(side):
            assert torch.npu.is_current_stream_capturing()
            more = doubled + 1
        other.wait_stream(side)  # without work of its own it need not be joined
        with torch.npu.stream(torch.npu.Stream()):
            assert not torch.npu.is_current_stream_capturing()
        main.wait_stream(side)
        result = more * doubled
    x.fill_(3)
    graph.replay()
    assert result.tolist() == [42, 42, 42, 42]
    event = side.record_event()
    main.wait_event(event)  # an ordinary stream again
    assert event.query()


@pytest.mark.parametrize("joined", [False, True])
def test_work_on_a_stream_that_is_not_joined_is_an_error_at_the_end(joined: bool) -> None:
    x, side = torch.ones(4, device=DEVICE), torch.npu.Stream()
    main, graph = torch.npu.current_stream(), torch.npu.NPUGraph()
    with pytest.raises(RuntimeError, match=r"not joined.*wait_stream"), torch.npu.graph(graph):
        side.wait_stream(main)
        on_stream(side, x.neg)
        if joined:
            main.wait_stream(side)
            on_stream(side, x.exp)
    assert not torch.npu.is_current_stream_capturing()
    with pytest.raises(RuntimeError, match="cannot be replayed"):
        graph.replay()
    graph.reset()


def test_an_error_in_the_captured_code_is_not_hidden_by_one_of_its_end() -> None:
    side = torch.npu.Stream()
    msg = "mine"
    with pytest.raises(ValueError, match="mine"), torch.npu.graph(torch.npu.NPUGraph()):
        side.wait_stream(torch.npu.current_stream())
        on_stream(side, lambda: torch.ones(3, device=DEVICE))
        raise ValueError(msg)
    assert not torch.npu.is_current_stream_capturing()


def test_a_capture_ends_on_the_stream_that_it_began_on() -> None:
    graph = torch.npu.NPUGraph()
    graph.capture_begin()
    with torch.npu.stream(torch.npu.Stream()), pytest.raises(RuntimeError, match="stream that it began on"):
        graph.capture_end()
    graph.capture_end()
    assert not torch.npu.is_current_stream_capturing()


def test_the_stream_is_the_callers_again_whatever_fails() -> None:
    graph, stream, main = torch.npu.NPUGraph(), torch.npu.Stream(), torch.npu.current_stream()
    with pytest.raises(RuntimeError, match="not joined"), torch.npu.graph(graph, stream=stream):
        side = torch.npu.Stream()
        side.wait_stream(stream)
        on_stream(side, lambda: torch.ones(3, device=DEVICE) + 1)
    assert torch.npu.current_stream() == main
    with pytest.raises(RuntimeError, match="call reset"):
        torch.npu.graph(graph, stream=stream).__enter__()
    assert torch.npu.current_stream() == main


STREAMS = st.integers(0, 2)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("launch"), STREAMS),
        st.tuples(st.just("record"), STREAMS, STREAMS),
        st.tuples(st.just("wait"), STREAMS, STREAMS),
    ),
    max_size=12,
)


class ModelOfCapture:
    """Knows which launches come before, of each stream of the capture and of each event that was recorded on one."""

    def __init__(self) -> None:
        self.before: dict[int, set[int]] = {0: set()}
        self.events: dict[int, set[int]] = {}

    def refuses(self, number: int, what: str, stream: int, event: int = 0) -> bool:
        """Return whether a step is refused; otherwise it has been taken."""
        inside, forks = stream in self.before, event in self.events
        if what == "launch":
            self.before.get(stream, set()).add(number)
            return not inside
        if what == "wait" and forks:
            self.before.setdefault(stream, set()).update(self.events[event])
        elif what == "record":
            self.events.pop(event, None)
            if inside:
                self.events[event] = set(self.before[stream])
        return what == "wait" and inside and not forks

    def is_joined(self) -> bool:
        return all(launches <= self.before[0] for launches in self.before.values())


@given(steps=STEPS)
@settings(max_examples=150, deadline=None)
def test_what_a_capture_takes_is_what_is_ordered_with_its_stream(steps: list[tuple]) -> None:
    x, streams = torch.ones(1, device=DEVICE), [torch.npu.current_stream(), torch.npu.Stream(), torch.npu.Stream()]
    events = [streams[0].record_event() for _ in range(3)]
    model, graph, refused = ModelOfCapture(), torch.npu.NPUGraph(), False
    graph.capture_begin()
    try:
        for number, (what, stream, *event) in enumerate(steps):
            refused = model.refuses(number, what, stream, *event)
            said = error_of(take, what, x, streams[stream], *(events[each] for each in event))
            assert bool(re.search(r"(not part|outside) of the capture", said)) == refused, said
            if refused:
                break
    finally:
        said = error_of(graph.capture_end)
    assert ("not joined" in said) == (not refused and not model.is_joined()), said
    assert ("cannot be replayed" in error_of(graph.replay)) == (refused or not model.is_joined())


def take(what: str, x: torch.Tensor, stream: torch.Stream, event: torch.Event | None = None) -> None:
    if what == "launch":
        on_stream(stream, x.neg)
    elif what == "record":
        stream.record_event(event)
    else:
        stream.wait_event(event)


def error_of(function, *arguments) -> str:
    try:
        function(*arguments)
    except RuntimeError as error:
        return str(error)
    return ""


def test_pinned_copies_are_part_of_the_graph() -> None:
    source = torch.ones(4).pin_memory()
    target = torch.empty(4).pin_memory()
    x = torch.empty(4, device=DEVICE)

    def step() -> None:
        x.copy_(source, non_blocking=True)
        target.copy_(x * 2, non_blocking=True)

    graph, _ = captured(step)
    source.fill_(5)
    graph.replay()
    assert target.tolist() == [10, 10, 10, 10]


def test_random_numbers_advance_on_replay() -> None:
    graph, drawn = captured(lambda: torch.randn(8, device=DEVICE))
    draws = set()
    for _ in range(3):
        graph.replay()
        draws.add(tuple(drawn.tolist()))
    assert len(draws) == 3
    torch.npu.manual_seed(3)
    graph.replay()
    torch.npu.manual_seed(3)
    assert torch.equal(drawn, torch.randn(8, device=DEVICE))


def test_memory_is_reused_within_a_graph_and_between_graphs_of_a_pool() -> None:
    x = torch.arange(float(MIB), device=DEVICE)

    def chain() -> torch.Tensor:
        y = x
        for _ in range(12):
            y = y + 1
        return y

    pool = torch.npu.graph_pool_handle()
    gc.collect()
    torch.npu.empty_cache()
    before = torch.npu.memory_reserved()
    first = torch.npu.NPUGraph()
    with torch.npu.graph(first, pool=pool):
        a = chain()
    assert torch.npu.memory_reserved() - before <= 14 * MIB
    weak = torch.ops._C.weak_ref_tensor(a)
    del a
    second = torch.npu.NPUGraph()
    with torch.npu.graph(second, pool=pool):
        b = chain()
    assert torch.npu.memory_reserved() - before <= 14 * MIB
    assert first.pool() == second.pool()
    first.replay()
    assert torch.equal(weak, x + 12)
    second.replay()
    assert torch.equal(b, x + 12)


def test_private_memory_is_given_back_when_the_graph_dies() -> None:
    x = torch.randn(4 * MIB, device=DEVICE)
    gc.collect()
    torch.npu.empty_cache()
    before = torch.npu.memory_reserved()
    graph, y = captured(lambda: (x + 1) * 2)
    torch.npu.empty_cache()
    assert torch.npu.memory_reserved() > before
    graph.replay()
    assert torch.equal(y, (x + 1) * 2)
    del graph, y
    gc.collect()
    torch.npu.empty_cache()
    assert torch.npu.memory_reserved() <= before


def test_eager_allocations_do_not_touch_a_live_graphs_memory() -> None:
    x = torch.randn(1000, device=DEVICE)
    graph, y = captured((x + 1).exp)
    filler = [torch.full((1000,), 7.0, device=DEVICE) for _ in range(50)]
    graph.replay()
    assert torch.equal(y, (x + 1).exp())
    assert all(torch.equal(f, torch.full_like(f, 7)) for f in filler)


def test_graph_keeps_its_inputs() -> None:
    x = torch.randn(1000, device=DEVICE)
    graph, y = captured(torch.neg, x)
    expected = -x
    del x
    others = [torch.randn(1000, device=DEVICE) for _ in range(4)]
    graph.replay()
    assert torch.equal(y, expected)
    assert len(others) == 4


def test_error_inside_the_capture_leaves_a_clean_state() -> None:
    graph = torch.npu.NPUGraph()
    with pytest.raises(ValueError, match="mine"), torch.npu.graph(graph):
        torch.ones(3, device=DEVICE)
        msg = "mine"
        raise ValueError(msg)
    assert not torch.npu.is_current_stream_capturing()
    assert torch.ones(3, device=DEVICE).sum().item() == 3


@pytest.mark.parametrize("forced", [False, True])
def test_garbage_is_looked_for_before_a_capture_where_torch_says_so(forced: bool) -> None:
    """As on cuda: it takes longer than to capture a model, and an engine captures a dozen times."""
    x = torch.ones(4, device=DEVICE)
    begun: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            begun.append(info["generation"])

    gc.callbacks.append(note)
    try:
        with torch.compiler.config.patch(force_cudagraph_gc=forced):
            gc.disable()  # of its own accord it would look as well
            graph, y = captured(torch.neg, x)
    finally:
        gc.enable()
        gc.callbacks.remove(note)
    assert begun == ([2] if forced else [])
    graph.replay()
    assert torch.equal(y, -x)


def test_a_graph_that_dies_on_another_thread_ends_the_capture() -> None:
    x = torch.ones(4, device=DEVICE)
    graphs = [torch.npu.NPUGraph()]
    begun, gone = threading.Event(), threading.Event()
    capturing, results = [], []

    def capture() -> None:
        graphs[0].capture_begin()
        first = x + 1
        capturing.append(torch.npu.is_current_stream_capturing())
        begun.set()
        gone.wait()
        second = x + 2
        capturing.append(torch.npu.is_current_stream_capturing())
        results.append((first + second).tolist())
        graph, third = captured(torch.neg, x)
        graph.replay()
        results.append(third.tolist())

    thread = threading.Thread(target=capture)
    thread.start()
    begun.wait()
    pool = graphs[0].pool()
    graphs.clear()
    gc.collect()
    assert torch.npu.memory._C.pool_users(pool[1]) == 1, "the thread still allocates from the pool of its capture"
    gone.set()
    thread.join()
    assert capturing == [True, False]
    assert results == [[5.0] * 4, [-1.0] * 4]
    assert not [segment for segment in torch.npu.memory_snapshot() if segment["segment_pool_id"] == pool]


def test_replay_from_another_thread_lets_python_run() -> None:
    x = torch.randn(512, 512, device=DEVICE)

    def heavy() -> torch.Tensor:
        y = x
        for _ in range(20):
            y = torch.tanh(y @ x)
        return y

    graph, y = captured(heavy)
    expected = heavy()
    running = threading.Event()
    seen = []

    def count() -> None:
        while not running.is_set():
            seen.append(time.perf_counter())
            time.sleep(0.0005)

    counter = threading.Thread(target=count)
    counter.start()
    start = time.perf_counter()
    for _ in range(5):
        graph.replay()
    end = time.perf_counter()
    running.set()
    counter.join()
    assert any(start < moment < end for moment in seen)
    torch.testing.assert_close(y, expected)
    worker = threading.Thread(target=graph.replay)
    worker.start()
    worker.join()
    torch.testing.assert_close(y, expected)


def test_graphed_callable() -> None:
    weight = torch.randn(4, 4, device=DEVICE)
    call = torch.npu.make_graphed_callables(lambda x: x @ weight, (torch.zeros(2, 4, device=DEVICE),))
    x = torch.randn(2, 4, device=DEVICE)
    torch.testing.assert_close(call(x), x @ weight)


def test_graphed_module_trains_as_the_eager_one() -> None:
    eager = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 2)).to(DEVICE)
    graphed = copy.deepcopy(eager)
    sample = torch.zeros(3, 4, device=DEVICE, requires_grad=True)
    assert torch.npu.make_graphed_callables(graphed, (sample,)) is graphed
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (eager, graphed)]
    for _ in range(3):
        x = torch.randn(3, 4, device=DEVICE)
        losses, gradients = [], []
        for model, optimizer in zip((eager, graphed), optimizers, strict=True):
            given = x.clone().requires_grad_()
            loss = model(given).square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            gradients.append(given.grad)
        assert losses[0] == pytest.approx(losses[1])
        torch.testing.assert_close(*gradients)
    for mine, theirs in zip(graphed.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)
    torch.testing.assert_close(graphed.eval()(x), eager(x))  # the other mode runs as it was


def test_graphed_callables_run_in_turn() -> None:
    scale = torch.tensor(3.0, device=DEVICE, requires_grad=True)
    sample = torch.ones(4, device=DEVICE, requires_grad=True)
    first, second = torch.npu.make_graphed_callables(
        (lambda x: {"sum": x * scale, "same": x.detach()}, lambda x: x.exp()),
        ((sample,), (torch.ones(4, device=DEVICE, requires_grad=True),)),
        allow_unused_input=True,
    )
    x = torch.rand(4, device=DEVICE, requires_grad=True)
    outputs = first(x)
    result = second(outputs["sum"])
    torch.testing.assert_close(result, (x * 3).exp())
    assert torch.equal(outputs["same"], x)
    result.sum().backward()
    torch.testing.assert_close(x.grad, 3 * (x * 3).exp())


def test_graphed_callables_refuse_what_a_replay_cannot_repeat() -> None:
    module = torch.nn.Linear(2, 2, device=DEVICE)
    sample = (torch.ones(1, 2, device=DEVICE),)
    with torch.autocast(DEVICE), pytest.raises(RuntimeError, match="cache_enabled=False"):
        torch.npu.make_graphed_callables(module, sample)
    with pytest.raises(ValueError, match="tensors only"):
        torch.npu.make_graphed_callables(module, (3.0,))
    module.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="without hooks"):
        torch.npu.make_graphed_callables(module, sample)


def test_debug_dump_names_the_launches(tmp_path) -> None:
    x = torch.ones(2, device=DEVICE)
    graph, _ = captured(lambda: x.exp().sort())
    graph.debug_dump(str(tmp_path / "graph.dot"))
    text = (tmp_path / "graph.dot").read_text()
    assert "aten::exp" in text
    assert "aten::sort" in text


def test_a_replay_whose_kernel_allocates_in_another_order_is_right_or_refused() -> None:
    """The matrices of a batch are sorted by their norms, with a list of indices for each of the ways to compute."""
    torch.manual_seed(0)
    scales = (
        [0.1, 1, 2, 0.01, 3],
        [3, 0.001, 0.1, 3, 2],
        [1, 1, 1, 1, 1],
        [0.001, 0.1, 0.01, 5, 5],
        [0.1, 1, 2, 0.01, 3],
    )
    batches = [torch.randn(5, 5, 5) * torch.tensor(each).view(5, 1, 1) for each in scales]
    x = batches[0].to(DEVICE)
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        result = torch.linalg.matrix_exp(x)
    computed = 0
    for batch in batches[1:]:
        x.copy_(batch)
        try:
            graph.replay()
        except RuntimeError as error:
            if "allocated its result differently on replay" not in str(error):
                raise
            continue
        torch.testing.assert_close(result.cpu(), torch.linalg.matrix_exp(batch))
        computed += 1
    assert computed
