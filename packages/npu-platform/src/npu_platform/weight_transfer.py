"""Owns the transfer of weights from a trainer to an engine over npu collectives: vLLM's dense engines, on npuccl.

A worker of ``--weight-transfer-config '{"backend": "npuccl"}'`` has :class:`NPUWeightTransferEngine`; a trainer passes
:class:`NPUTrainerInitInfo` to vLLM's ``WeightTransferTrainerFactory.trainer_init``. The import registers both.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

import torch
from vllm.distributed.weight_transfer import nccl_common, packed_tensor
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.nccl_engine import (
    NCCLTrainerInitInfo,
    NCCLTrainerWeightTransferEngine,
    NCCLWeightTransferEngine,
)

from npu_platform import compat
from npu_platform.errors import ConfigurationError
from npu_platform.torch_npu.distributed import BACKEND, make_backend

__all__ = ["NPUTrainerInitInfo", "NPUTrainerWeightTransferEngine", "NPUWeightTransferEngine", "WeightGroup"]

_TIMEOUT = timedelta(minutes=5)


class WeightGroup:
    """The trainer, which is rank 0, and all workers; in the place of vLLM's ``PyNcclCommunicator``."""

    def __init__(self, master_address: str, master_port: int, rank: int, world_size: int, device: int) -> None:
        """Meet the other ranks at rank 0's port; returns when all are there."""
        self._device = torch.device("npu", device)
        self._store = torch.distributed.TCPStore(master_address, master_port, world_size, rank == 0, _TIMEOUT)
        self._backend: Any = make_backend(self._store, rank, world_size, _TIMEOUT)

    def broadcast(self, tensor: torch.Tensor, src: int, stream: object = None) -> None:
        """Send rank `src`'s tensor to all; returns when this rank's part is done. A sender's may lie on the host."""
        del stream  # collectives wait for the current one
        options = torch.distributed.BroadcastOptions()
        options.rootRank = src
        self._backend.broadcast([tensor.to(self._device)], options).wait()

    def destroy(self) -> None:
        """Leave the group."""
        self._backend = None


def _refuse_unique_id(*_: object, **__: object) -> None:
    msg = "nccl_unique_id_b64 is for NCCL: pass master_address and master_port to the engine's init_info."
    raise ConfigurationError(msg)


# vLLM's functions, which make the group of NCCL and its streams by name.
_meeting = {"stateless_init_process_group": WeightGroup, "uid_init_process_group": _refuse_unique_id}
_streams = compat.with_npu_streams(packed_tensor._get_streams)
_consume = compat.with_npu_streams(packed_tensor.packed_nccl_broadcast_consumer, _get_streams=_streams)
_produce = compat.with_npu_streams(packed_tensor.packed_nccl_broadcast_producer, _get_streams=_streams)


class NPUWeightTransferEngine(NCCLWeightTransferEngine):
    """vLLM's engine that receives whole parameters in the checkpoint's format, by broadcast."""

    init_transfer_engine = compat.reading(
        NCCLWeightTransferEngine.init_transfer_engine,
        worker_init_process_group=compat.reading(nccl_common.worker_init_process_group, **_meeting),
    )
    receive_weights = compat.with_npu_streams(
        NCCLWeightTransferEngine.receive_weights, packed_nccl_broadcast_consumer=_consume
    )


@dataclass
class NPUTrainerInitInfo(NCCLTrainerInitInfo):
    """Where trainer and workers meet (master_address, master_port, world_size), and this trainer's rank."""

    backend: ClassVar[str] = BACKEND


class NPUTrainerWeightTransferEngine(NCCLTrainerWeightTransferEngine):
    """vLLM's sender of whole parameters; the parameters may lie on an npu device or on the host."""

    init_info_cls = NPUTrainerInitInfo
    _broadcast = compat.with_npu_streams(
        NCCLTrainerWeightTransferEngine._broadcast, packed_nccl_broadcast_producer=_produce
    )


_opener, _opens = compat.opening_endpoint(
    NCCLTrainerWeightTransferEngine, compat.reading(nccl_common.trainer_init, **_meeting)
)
setattr(NPUTrainerWeightTransferEngine, _opener, _opens)

WeightTransferEngineFactory.register_engine(BACKEND, NPUWeightTransferEngine)
WeightTransferTrainerFactory.register_engine(BACKEND, NPUTrainerWeightTransferEngine)
