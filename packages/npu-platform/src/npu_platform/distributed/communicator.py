"""NPUCommunicator: the collectives of vLLM's parallel groups on npu tensors."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions
from vllm.distributed.device_communicators.all2all import AgRsAll2AllManager
from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase

from npu_platform import _C

# What is gathered along another dimension than the first lies in as many pieces of each rank. A piece's own exchange
# takes 7 us; so many of so many bytes are copied to their places in more.
_FEWEST_PIECES, _PIECE_BYTES = 4, 64 << 10


class NPUCommunicator(DeviceCommunicatorBase):
    """vLLM's device communicator over the process group of npu tensors (``npuccl``).

    The base class covers the collectives of equal sizes; the ``v`` variants, whose sizes differ by rank, are here, and
    with them the exchange of tokens between data-parallel replicas that share experts.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Build vLLM's communicator; arguments are those of ``DeviceCommunicatorBase``."""
        super().__init__(*args, **kwargs)
        if self.use_all2all:
            self.all2all_manager: AgRsAll2AllManager = AgRsAll2AllManager(self.cpu_group)

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks, in place."""
        if torch.compiler.is_compiling():  # Dynamo knows that of torch.distributed only
            return super().all_reduce(input_)
        # torch.distributed takes several times as long as small sums do.
        _C.sum_over_ranks(self._backend, input_)
        return input_

    def all_gather(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Return the ranks' tensors, joined along a dimension."""
        dim %= input_.dim()
        outer = math.prod(input_.shape[:dim])
        if outer >= _FEWEST_PIECES and input_.nbytes >= outer * _PIECE_BYTES and not torch.compiler.is_compiling():
            return self._all_gather_pieces(input_, dim, outer)
        rows = input_.new_empty((self.world_size * input_.shape[0], *input_.shape[1:]))
        self.all_gather_into(rows, input_.contiguous())
        return rows.view(self.world_size, *input_.shape).movedim(0, dim).flatten(dim, dim + 1)

    def _all_gather_pieces(self, input_: torch.Tensor, dim: int, outer: int) -> torch.Tensor:
        """Gather each of `outer` pieces into its place: to copy a batch's logits there takes longer than to gather."""
        whole = input_.new_empty((outer, self.world_size, input_.numel() // outer))
        places = [list(whole[:, rank].unbind()) for rank in range(self.world_size)]
        options = AllgatherOptions()
        options.asyncOp = False  # a thread of the group's own would gather, for this one to wait
        self._backend.allgather_coalesced(places, list(input_.reshape(outer, -1).unbind()), options).wait()
        return whole.view(*input_.shape[:dim], self.world_size * input_.shape[dim], *input_.shape[dim + 1 :])

    def all_gather_into(self, output: torch.Tensor, input_: torch.Tensor) -> None:
        """Write the ranks' tensors [n, ...] into a contiguous output [ranks * n, ...], as gloo wants it, too."""
        if torch.compiler.is_compiling():
            dist.all_gather_into_tensor(output, input_, group=self.device_group)
        else:
            _C.gather_from_ranks(self._backend, output, input_)

    @functools.cached_property
    def _backend(self) -> Any:
        return self.device_group._get_backend(torch.device(self.device.type))

    def dispatch_router_logits(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Gather the tokens and router logits of all replicas; arguments are those of vLLM's manager."""
        return self.all2all_manager.dispatch_router_logits(*args, **kwargs)

    def dispatch(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Gather the tokens, expert weights and expert ids of all replicas; arguments are those of vLLM's manager."""
        return self.all2all_manager.dispatch(*args, **kwargs)

    def combine(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Sum the experts' outputs over the replicas and return this one's tokens."""
        return self.all2all_manager.combine(*args, **kwargs)

    def all_gatherv(
        self, input_: torch.Tensor | list[torch.Tensor], dim: int = 0, sizes: list[int] | None = None
    ) -> torch.Tensor | list[torch.Tensor]:
        """Concatenate the ranks' tensors along dimension 0; `sizes` are the ranks' lengths, None for equal ones."""
        _require_dim_zero("all_gatherv", dim)
        if isinstance(input_, list):
            return [self._all_gatherv(tensor, sizes) for tensor in input_]
        return self._all_gatherv(input_, sizes)

    def reduce_scatterv(self, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None) -> torch.Tensor:
        """Sum over the ranks and return this rank's `sizes[rank]` rows of dimension 0."""
        _require_dim_zero("reduce_scatterv", dim if dim >= 0 else dim + input_.dim())
        lengths = sizes or [input_.shape[0] // self.world_size] * self.world_size
        longest = max(lengths)
        parts = input_.contiguous()
        if min(lengths) < longest:
            parts = torch.cat([_padded(part, longest) for part in input_.split(lengths)])
        own = input_.new_empty(longest, *input_.shape[1:])
        dist.reduce_scatter_tensor(own, parts, group=self.device_group)
        return own[: lengths[self.rank_in_group]]

    def batch_isend_irecv(self, p2p_ops: list[dist.P2POp]) -> None:
        """Run the point-to-point operations together and wait for all of them."""
        for work in dist.batch_isend_irecv(p2p_ops):
            work.wait()

    def _all_gatherv(self, tensor: torch.Tensor, sizes: list[int] | None) -> torch.Tensor:
        """Gather rows of the longest rank from each, which any backend can, and leave out what is too many."""
        lengths = sizes or [tensor.shape[0]] * self.world_size
        longest = max(lengths)
        rows = tensor.new_empty(self.world_size * longest, *tensor.shape[1:])
        self.all_gather_into(rows, _padded(tensor, longest).contiguous())
        if min(lengths) == longest:
            return rows
        return torch.cat([part[:length] for part, length in zip(rows.split(longest), lengths, strict=True)])


def _padded(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """Return the tensor with zeros behind it, `rows` in all."""
    missing = rows - tensor.shape[0]
    return torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])]) if missing else tensor


def _require_dim_zero(name: str, dim: int) -> None:
    if dim != 0:
        msg = f"{name} works along dimension 0, not {dim}: move the dimension first."
        raise ValueError(msg)
