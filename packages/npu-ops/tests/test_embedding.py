from __future__ import annotations

import pytest
import torch


@pytest.mark.parametrize("ids", [torch.int64, torch.int32])
@pytest.mark.parametrize("shape", [(7,), (2, 3), (0,)])
def test_rows_by_index(ops, isa, device, dtype, ids, shape):
    table, where = torch.randn(50, 33).to(dtype), torch.randint(0, 50, shape).to(ids)
    assert torch.equal(ops.embedding(where.to(device), table.to(device)).cpu(), table[where.long()])


def test_strided_table(ops, isa):
    table = torch.randn(50, 64)[:, :40]
    assert torch.equal(ops.embedding(torch.tensor([49, 0]), table), table[[49, 0]])


@pytest.mark.parametrize("index", [-1, 50, 2**40])
def test_index_outside_the_table_is_visible(ops, isa, dtype, index):
    y = ops.embedding(torch.tensor([3, index]), torch.randn(50, 8).to(dtype))
    assert y[1].isnan().all()
    assert not y[0].isnan().any()
