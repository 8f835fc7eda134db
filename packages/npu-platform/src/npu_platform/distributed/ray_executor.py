"""NPURayExecutor: vLLM's executor over Ray, which says what it waits for, and sees meanwhile that a node has failed."""

from __future__ import annotations

from vllm.v1.executor import ray_utils
from vllm.v1.executor.ray_executor_v2 import RayExecutorV2

from npu_platform import compat
from npu_platform.distributed import calls, shares_cores
from npu_platform.distributed.executor import AllAnswers, LocalAnswers, RemoteAnswers
from npu_platform.distributed.ray_devices import missing_devices, saying_what_is_missing


class NPURayExecutor(RayExecutorV2):
    """vLLM's executor, whose wait for a rank ends when Ray says that one has died, and which leaves nothing behind.

    vLLM 0.32 sees that and shuts down, but what waits for the answer of the rank that died goes on waiting, for
    ``VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS``. And Ray kills the ranks at each end, so that none removes its shared memory.
    """

    def _init_executor(self) -> None:
        with saying_what_is_missing(self._missing_devices):
            super()._init_executor()

    def _post_init_executor(self) -> None:
        for queue in self.response_mqs:
            compat.remove_name(queue)
        queues = self.response_mqs
        if shares_cores():
            calls.let_ranks_sleep(self.rpc_broadcast_mq)
            queues = [LocalAnswers(queue) if compat.is_of_this_host(queue) else queue for queue in queues]
        self.response_mqs = AllAnswers([RemoteAnswers(queue, self) for queue in queues])

    def _missing_devices(self) -> str | None:
        """Return what Ray's nodes lack, while vLLM waits for their devices, which it does for half an hour."""
        ray, parallel = ray_utils.ray, self.parallel_config
        if parallel.placement_group is not None or not ray.is_initialized():
            return None
        return missing_devices(ray.nodes(), ray_utils.available_resources_per_node(), parallel.world_size)
