"""NPURayExecutor: vLLM's executor over Ray, which sees while it waits that a node has failed."""

from __future__ import annotations

from vllm.v1.executor.ray_executor_v2 import RayExecutorV2

from npu_platform import compat
from npu_platform.distributed.executor import RemoteAnswers


class NPURayExecutor(RayExecutorV2):
    """vLLM's executor, whose wait for a rank ends when Ray says that one has died, and which leaves nothing behind.

    vLLM 0.32 sees that and shuts down, but what waits for the answer of the rank that died goes on waiting, for
    ``VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS``. And Ray kills the ranks at each end, so that none removes its shared memory.
    """

    def _post_init_executor(self) -> None:
        for queue in self.response_mqs:
            compat.remove_name(queue)
        self.response_mqs = [RemoteAnswers(queue, self) for queue in self.response_mqs]
