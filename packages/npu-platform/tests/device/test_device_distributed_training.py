"""What training asks of ranks: batch norms over all of them, collectives that are waited for together."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .ranks import Ranks

SYNC_BATCH_NORM = """
import copy

def check_batch_norm(shape, dtype, affine, layout):
    torch.manual_seed(4)
    kind = torch.nn.BatchNorm2d if len(shape) == 4 else torch.nn.BatchNorm1d
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    close = dict(rtol=5e-2, atol=0.2) if dtype == torch.bfloat16 else dict(rtol=1e-4, atol=1e-4)
    single = kind(shape[1], affine=affine, dtype=wide)
    for parameter in single.parameters(): torch.nn.init.normal_(parameter)
    joint = torch.nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(single)).to("npu")
    whole, towards = (torch.randn(shape).to(dtype) for _ in range(2))
    mine = slice(0, 3) if rank == 0 else slice(3, None)

    x = whole.to(wide, copy=True).requires_grad_()
    expected = single(x)
    expected.backward(towards.to(wide))
    y = whole[mine].to("npu", memory_format=layout).requires_grad_()
    result = joint(y)
    result.backward(towards[mine].to("npu"))
    for parameter in joint.parameters(): dist.all_reduce(parameter.grad)

    assert result.dtype == dtype and result.stride() == y.grad.stride() == y.stride()
    pairs = [(result, expected[mine]), (y.grad, x.grad[mine]), (joint.running_mean, single.running_mean)]
    pairs += [(joint.running_var, single.running_var)]
    pairs += [(ours.grad, theirs.grad) for ours, theirs in zip(joint.parameters(), single.parameters())]
    for actual, wanted in pairs: torch.testing.assert_close(actual.cpu().to(wide), wanted, **close)
"""

COALESCED = """
from torch.distributed import distributed_c10d
def coalesced(asynchronous):
    device = torch.device("npu", rank)
    sums = [torch.full((3,), float(rank + i), device=device) for i in range(3)]
    with distributed_c10d._coalescing_manager(device=device, async_ops=asynchronous) as manager:
        for each in sums: dist.all_reduce(each)
    if asynchronous: manager.wait()
    return [each[0].item() for each in sums]

def messages():
    group, device = dist.group.WORLD, torch.device("npu", rank)
    mine, theirs, total = (torch.full((3,), rank + 1.0, device=device) for _ in range(3))
    group._start_coalescing(device)
    sent, received = dist.isend(mine, 1 - rank), dist.irecv(theirs, 1 - rank)
    received.wait()
    dist.all_reduce(total, async_op=True)
    work = group._end_coalescing(device)
    work.wait()
    return [theirs[0].item(), total[0].item()]
"""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with Ranks(2, tmp_path_factory.mktemp("pair")) as ranks:
        ranks.run(SYNC_BATCH_NORM)
        ranks.run(COALESCED)
        yield ranks


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize(
    ("shape", "layout"),
    [("(8, 5)", "contiguous_format"), ("(8, 5, 7)", "contiguous_format"), ("(8, 5, 3, 4)", "channels_last")],
)
@pytest.mark.parametrize("affine", [True, False])
def test_batch_norm_over_ranks_is_that_of_the_whole_batch(
    pair: Ranks, shape: str, layout: str, dtype: str, affine: bool
) -> None:
    pair.run(f"check_batch_norm({shape}, torch.{dtype}, {affine}, torch.{layout})")


@pytest.mark.parametrize("asynchronous", [False, True])
def test_collectives_may_be_waited_for_together(pair: Ranks, asynchronous: bool) -> None:
    assert pair.run(f"value = coalesced({asynchronous})") == [[1, 3, 5]] * 2


def test_messages_among_them_may_have_been_waited_for_before(pair: Ranks) -> None:
    assert pair.run("value = messages()") == [[2, 3], [1, 3]]


def test_an_end_without_a_start_is_refused(pair: Ranks) -> None:
    pair.start("dist.group.WORLD._end_coalescing(torch.device('npu', rank))")
    assert all("belongs after startCoalescing()" in str(reply.error) for reply in pair.replies())
