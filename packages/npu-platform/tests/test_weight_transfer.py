"""Weight transfer by itself: vLLM still reads the names that we give it otherwise, and NCCL's own ways are refused."""

from __future__ import annotations

import socket

import pytest
import torch
from vllm.config import ParallelConfig
from vllm.distributed.weight_transfer import nccl_common, packed_tensor
from vllm.distributed.weight_transfer.nccl_engine import (
    NCCLTrainerWeightTransferEngine,
    NCCLWeightTransferEngine,
    NCCLWeightTransferInitInfo,
)

from npu_platform import weight_transfer
from npu_platform.errors import ConfigurationError
from npu_platform.weight_transfer import WeightGroup

# vLLM 0.33 has a method for it.
OPENER = getattr(
    NCCLTrainerWeightTransferEngine, "_open_trainer_endpoint", NCCLTrainerWeightTransferEngine.trainer_init
)
OPENER = getattr(OPENER, "__func__", OPENER)
READ = {
    NCCLWeightTransferEngine.init_transfer_engine: ["worker_init_process_group"],
    NCCLWeightTransferEngine.receive_weights: ["packed_nccl_broadcast_consumer", "cuda"],
    OPENER: ["open_trainer_endpoint"],
    NCCLTrainerWeightTransferEngine._broadcast: ["packed_nccl_broadcast_producer", "cuda"],
    nccl_common.worker_init_process_group: ["stateless_init_process_group", "uid_init_process_group"],
    nccl_common.trainer_init: ["stateless_init_process_group"],
    packed_tensor.packed_nccl_broadcast_consumer: ["_get_streams", "cuda"],
    packed_tensor.packed_nccl_broadcast_producer: ["_get_streams", "cuda"],
}


@pytest.mark.parametrize("function", READ, ids=lambda function: function.__name__)
def test_vllm_still_reads_the_names_that_are_given_otherwise(function: object) -> None:
    assert set(READ[function]) <= set(function.__code__.co_names)


def test_an_identifier_of_nccl_is_refused() -> None:
    info = NCCLWeightTransferInitInfo(rank_offset=1, world_size=2, nccl_unique_id_b64="A" * 170 + "A=")
    engine = object.__new__(weight_transfer.NPUWeightTransferEngine)
    engine.parallel_config = ParallelConfig()
    engine._last_update_info = {}  # of vLLM 0.33
    with pytest.raises(ConfigurationError, match="pass master_address and master_port"):
        engine.init_transfer_engine(info)


@pytest.mark.parametrize("device", ["cpu", "npu"])
def test_a_sender_may_hold_its_weights_anywhere(device: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    group = WeightGroup("127.0.0.1", port, rank=0, world_size=1, device=0)
    weights = torch.arange(5.0, device=device)
    group.broadcast(weights, src=0)
    assert weights.tolist() == [0, 1, 2, 3, 4]
    group.destroy()
