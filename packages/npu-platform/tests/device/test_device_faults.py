"""Faults on demand: each strikes where it was told to, is the error of hardware, and leaves a device that works."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import pytest
import torch
from torch.npu import faults
from transformers import LlamaConfig, LlamaForCausalLM

from .conftest import RunPython

DEVICE = "npu"


@pytest.fixture(autouse=True)
def no_fault_stays() -> Iterator[None]:
    """Leave a device without faults to the next test."""
    yield
    faults.clear()
    faults.reset_device()


def ones(n: int = 8) -> torch.Tensor:
    return torch.ones(n, device=DEVICE)


def works() -> bool:
    return (ones() + 1).sum().item() == 16


# ---- out of memory ----


def test_the_nth_allocation_is_out_of_memory() -> None:
    with faults.inject_out_of_memory(at=3) as fault:
        ones()
        x = ones()
        with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 32 bytes.*'oom@3'"):
            ones()
        assert ones().sum().item() == 8
    assert fault.struck == 1
    assert fault.history == ["allocation 3 on npu:0"]
    del x
    assert works()


def test_out_of_memory_goes_on_for_as_long_as_told() -> None:
    with faults.inject_out_of_memory(at=2, times=2):
        ones()
        for _ in range(2):
            with pytest.raises(torch.OutOfMemoryError):
                ones()
        ones()
    with faults.inject_out_of_memory(times=0) as fault:
        for _ in range(5):
            with pytest.raises(torch.OutOfMemoryError):
                ones()
    assert fault.struck == 5


class Training:
    """Steps of a small Llama that start from the same weights and states of the optimizer each time."""

    def __init__(self) -> None:
        config = LlamaConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            attn_implementation="sdpa",
        )
        torch.manual_seed(0)
        self.model = LlamaForCausalLM(config).to(DEVICE)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.ids = torch.arange(12, device=DEVICE).reshape(2, 6)
        self.step()  # now the optimizer has its states
        states = self.optimizer.state.values()
        self.tensors = [*self.model.parameters(), *(t for state in states for t in state.values())]
        self.start = [tensor.detach().to("cpu", copy=True) for tensor in self.tensors]

    def step(self) -> float:
        """Do forward, backward and the optimizer's step; returns the loss."""
        self.optimizer.zero_grad()
        loss = self.model(self.ids, labels=self.ids).loss
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def run_from_start(self) -> tuple[float, list[torch.Tensor]]:
        """Return the loss of a step and all that it has changed."""
        with torch.no_grad():
            for tensor, value in zip(self.tensors, self.start, strict=True):
                tensor.copy_(value)
        loss = self.step()
        return loss, [tensor.detach().to("cpu", copy=True) for tensor in self.tensors]

    def leaves(self, allocated: int) -> bool:
        """Return whether that is allocated but for gradients, when autograd's own threads have let go of theirs."""
        self.optimizer.zero_grad()
        for _ in range(1000):
            gc.collect()
            if torch.npu.memory_allocated() == allocated:
                return True
            time.sleep(0.01)
        return False


def test_out_of_memory_at_any_allocation_of_a_step_leaves_the_device_as_it_was() -> None:
    training = Training()
    expected_loss, expected = training.run_from_start()
    gc.collect()
    gc.freeze()  # what is there already is not looked through after each step
    training.optimizer.zero_grad()
    base, ooms = torch.npu.memory_allocated(), torch.npu.memory_stats()["num_ooms"]
    for n in count(1):
        with faults.inject_out_of_memory(at=n) as fault:
            try:
                loss, results = training.run_from_start()
            except torch.OutOfMemoryError:
                assert fault.struck == 1
            else:
                assert fault.struck == 0
                break
        assert training.leaves(base), f"after the failure of allocation {n}"
        assert works(), f"after the failure of allocation {n}"
    assert loss == expected_loss
    assert all(map(torch.equal, results, expected)), "a whole step after all that have failed"
    assert n > 200, "forward, backward and the optimizer's step allocate more often than that"
    assert torch.npu.memory_stats()["num_ooms"] - ooms == n - 1


# ---- kernels ----


def test_a_kernel_fails_by_its_name_and_its_turn() -> None:
    x = ones().reshape(1, 8)
    with faults.fail_kernel("aten::mm", at=2) as fault:
        assert (x @ x.T).item() == 8
        with pytest.raises(
            torch.AcceleratorError, match=r"kernel aten::mm\S* failed on npu:0: .*'kernel=aten::mm@2'"
        ) as caught:
            _ = x @ x.T
        assert isinstance(caught.value, RuntimeError)
        assert (x @ x.T).item() == 8
    assert fault.struck == 1
    assert works()


def test_a_name_means_its_overloads_and_no_longer_names() -> None:
    x = ones()
    with faults.fail_kernel("aten::su", times=0), faults.fail_kernel("aten::sum", times=0) as fault:
        with pytest.raises(torch.AcceleratorError):
            x.sum()
        _ = x - x
    assert fault.struck == 1


def test_any_kernel_may_be_the_one() -> None:
    x, y = ones(), ones()
    with faults.fail_kernel(at=2):
        x.add_(1)
        with pytest.raises(torch.AcceleratorError, match=r"kernel aten::mul_\.Tensor failed"):
            x.mul_(2)
        y.copy_(x)
    assert torch.equal(y.cpu(), torch.full((8,), 2.0)), "the kernel that failed wrote nothing"


def test_a_kernel_in_a_graph_fails_at_its_replay() -> None:
    x = ones()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        y = x * 3
    with faults.fail_kernel("aten::mul", at=2):
        graph.replay()
        with pytest.raises(torch.AcceleratorError, match="aten::mul"):
            graph.replay()
    x.fill_(5)
    graph.replay()
    assert y.sum().item() == 120


def test_backward_fails_as_forward_does() -> None:
    x = ones().requires_grad_()
    loss = (x * x).sum()
    with faults.fail_kernel(), pytest.raises(torch.AcceleratorError):
        loss.backward()
    assert works()


# ---- a lost device ----


def test_a_lost_device_fails_until_it_is_reset() -> None:
    x = ones()
    before = torch.npu.memory_allocated()
    faults.lose_device()
    for use in (
        lambda x=x: x + 1,
        x.cpu,
        x.sum,
        x[0].item,
        lambda: torch.empty(3, device=DEVICE),
        torch.npu.synchronize,
        torch.npu.mem_get_info,
        torch.npu.current_stream().synchronize,
        torch.npu.current_stream().query,
        torch.npu.Event().record,
        torch.npu.Stream,
    ):
        with pytest.raises(RuntimeError, match=r"npu:0 is lost .*torch\.npu\.faults\.reset_device\(0\)"):
            use()
    del x, use
    assert torch.npu.memory_allocated() < before, "tensors can be freed"
    faults.reset_device()
    assert works()


def test_a_device_is_lost_at_a_launch_and_forgets() -> None:
    x = ones()
    fault = faults.lose_device(at=2)
    assert fault is not None
    x.add_(1)
    for _ in range(3):
        with pytest.raises(torch.AcceleratorError, match=r"lost \(at kernel aten::add_\.Tensor by 'lost@2:device=0'\)"):
            x.add_(1)
    assert fault.struck == 1
    faults.reset_device()
    assert x.sum().item() == 0, "what was in its memory is gone"
    assert works()


def test_a_device_is_lost_alone(run_python: RunPython) -> None:
    done = run_python(
        """
import torch
a, b = torch.ones(2, device="npu:0"), torch.ones(2, device="npu:1")
torch.npu.faults.lose_device(1)
print((a + 1).sum().item())
for use in (lambda: b + 1, lambda: a.to("npu:1"), lambda: b.to("npu:0"), lambda: torch.npu.synchronize(1)):
    try: use()
    except RuntimeError as error: print("npu:1 is lost" in str(error))
torch.npu.synchronize(0)
""",
        NPU_SIMULATOR_DEVICES="2",
        NPU_SIMULATOR_MEMORY="64MiB",
    )
    assert done.stdout.split() == ["4.0", "True", "True", "True", "True"], done.stderr


# ---- a wrong bit ----


def wrong_elements(seed: int, at: int) -> list[int]:
    x = torch.arange(64, dtype=torch.int32, device=DEVICE)
    with faults.flip_bit(seed=seed, at=at, name="aten::add") as fault:
        results = [(x + 1).cpu() for _ in range(3)]
    assert fault.struck == 1
    assert "of the 256 bytes at 0x" in fault.history[0]
    assert torch.equal(x.cpu(), torch.arange(64, dtype=torch.int32)), "its operand is as it was"
    changed = [(result ^ torch.arange(1, 65, dtype=torch.int32)).tolist() for result in results]
    assert [any(result) for result in changed] == [n == at - 1 for n in range(3)]
    assert sum(value.bit_count() for value in changed[at - 1]) == 1
    return changed[at - 1]


def test_one_bit_of_one_result_flips_the_same_for_the_same_seed() -> None:
    assert wrong_elements(7, 2) == wrong_elements(7, 2)
    assert wrong_elements(7, 2) != wrong_elements(8, 2)


def test_a_bit_flips_in_what_is_written_in_place() -> None:
    x = torch.zeros(32, dtype=torch.uint8, device=DEVICE)
    ones()
    with faults.flip_bit(name="aten::mul_"):
        x.mul_(2)
    assert sum(value.bit_count() for value in x.tolist()) == 1
    x.zero_()
    with faults.flip_bit(seed=1, name="aten::_copy_from"):
        x.copy_(torch.zeros(32, dtype=torch.uint8))
    assert sum(value.bit_count() for value in x.tolist()) == 1


# ---- slowness ----


def test_launches_are_slow_and_the_link_is() -> None:
    x = ones()
    start = time.monotonic()
    with faults.slow_down(0.02, name="aten::add") as fault:
        for _ in range(3):
            x = x + 1
        _ = x * 2
    assert time.monotonic() - start >= 0.06
    assert fault.struck == 3
    with faults.slow_link(0.02) as link:
        x = x.clone() + 1
        assert link.struck == 0, "within the device there is no link"
        start = time.monotonic()
        x.cpu()
        torch.ones(3).to(DEVICE)
        x[0].item()
        assert time.monotonic() - start >= 0.06
    assert link.struck == 3


# ---- arming ----


@pytest.mark.parametrize(
    ("arm", "text"),
    [
        (lambda: faults.inject_out_of_memory(37), "oom@37"),
        (lambda: faults.fail_kernel("npu_ops::linear", 5), "kernel=npu_ops::linear@5"),
        (lambda: faults.fail_kernel(times=0, device=0), "kernel@1:device=0:times=0"),
        (lambda: faults.lose_device("npu:0", at=100), "lost@100:device=0"),
        (lambda: faults.flip_bit(7, 12), "bitflip@12:seed=7"),
        (lambda: faults.flip_bit(7, 12, "aten::mm.out"), "bitflip@12:kernel=aten::mm.out:seed=7"),
        (lambda: faults.slow_down(0.002, "aten::mm"), "slow=2000us:kernel=aten::mm"),
        (lambda: faults.slow_link(2e-4), "slow_link=200us"),
    ],
)
def test_a_fault_is_known_by_the_text_that_arms_it(arm: Callable[[], faults.Fault], text: str) -> None:
    with arm() as fault:
        assert fault.text == text
    with faults.Fault(text) as again:
        assert again.text == text


@pytest.mark.parametrize(
    "text",
    ["", "oom@0", "oom@x", "oom=3", "boom@3", "kernel=@1", "slow", "slow=2", "slow=-2ms", "lost@1:times=2", "oom@1:seed=3",
     "bitflip@1:seed=", "bitflip:sed=1", "oom@1:device=99", "slow_link=2ms:kernel=aten::mm"],
)  # fmt: skip
def test_what_is_not_a_fault_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a fault"):
        faults.Fault(text)


@pytest.mark.parametrize(
    "arm",
    [
        lambda: faults.inject_out_of_memory(at=0),
        lambda: faults.inject_out_of_memory(device=99),
        lambda: faults.fail_kernel("aten::mm, aten::add"),
        lambda: faults.flip_bit(seed=-1),
        lambda: faults.slow_down(0),
        lambda: faults.lose_device("cpu"),
    ],
)
def test_bad_arguments_are_refused(arm: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match="must be|expected an npu device"):
        arm()


def test_clear_disarms_and_a_spent_fault_strikes_no_more() -> None:
    faults.inject_out_of_memory(at=2, times=0)
    faults.clear()
    ones()
    assert works()


def test_the_environment_arms_the_same_faults(run_python: RunPython) -> None:
    program = """
import torch
x = torch.ones(4, device="npu")
for n in range(1, 4):
    try: x.mul(2)
    except torch.OutOfMemoryError as error: print(n, "oom@3" in str(error))
    except torch.AcceleratorError as error: print(n, "kernel=aten::mul@1" in str(error))
torch.npu.faults.clear()
print(x.mul(2).sum().item())
"""
    done = run_python(program, NPU_DEBUG="kernel=aten::mul@1,oom@3,slow=1us")
    assert done.stdout.split("\n")[:-1] == ["1 True", "2 True", "8.0"], done.stderr


@pytest.mark.parametrize("value", ["2", "memory,boom@1", "oom@", "slow=fast"])
def test_a_bad_environment_is_an_error_at_first_use(run_python: RunPython, value: str) -> None:
    done = run_python(
        "import torch\nprint('imported', torch.npu.is_available())\n"
        "try: torch.ones(1, device='npu')\nexcept RuntimeError as error: print(error)\n",
        NPU_DEBUG=value,
    )
    assert "imported False" in done.stdout, done.stderr
    assert f"NPU_DEBUG='{value}' cannot be used: '{value.rpartition(',')[2]}' is none of memory" in done.stdout


def test_several_threads_meet_a_fault_once() -> None:
    def work(_: int) -> int:
        try:
            ones().add_(1)
        except torch.AcceleratorError:
            return 1
        return 0

    with faults.fail_kernel("aten::add_", at=50) as fault, ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(work, range(100))) == 1
    assert fault.struck == 1
