"""The scheduler's half: signs what others may read here, and reads elsewhere only what was signed for the prompt."""

from __future__ import annotations

import functools
import os
import time
from typing import TYPE_CHECKING, Any

import msgspec
import zmq
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import GET_META_MSG
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import NixlPullConnectorScheduler
from vllm.logger import init_logger

from npu_kvconnector.errors import OptionError
from npu_kvconnector.p2p.channel import ChannelKeys, serve
from npu_kvconnector.p2p.tickets import Tickets, prompt_digest

if TYPE_CHECKING:
    import threading
    from collections.abc import Mapping

    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

    from npu_kvconnector.p2p.config import P2PConfig

__all__ = ["TicketScheduler", "answer_handshake"]

logger = init_logger("vllm.npu_kvconnector")


class TicketScheduler(NixlPullConnectorScheduler):
    """vLLM's scheduler half of the pull connector, with tickets and an encrypted side channel."""

    def __init__(
        self, vllm_config: VllmConfig, engine_id: str, kv_cache_config: KVCacheConfig, config: P2PConfig
    ) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        self._config = config
        secret = config.secret()
        self._keys = ChannelKeys.derive(secret)
        self._tickets = Tickets(secret)
        self._refused: zmq.ZMQError | None = None

    def on_new_request(self, request: Request) -> None:
        """Take out of a request's parameters what it may not ask for; its prompt is then computed here."""
        params = request.kv_transfer_params
        if params:
            refusal = self._refusal(request, params) if params.get("do_remote_prefill") else "none are to be read here"
            if refusal is not None:
                self._strip(request, params, refusal)
        super().on_new_request(request)

    def request_finished(self, request: Request, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        """Add a ticket to the parameters with which a decode server may read this prompt's blocks."""
        is_kept, params = super().request_finished(request, block_ids)
        if params is None or request.prompt_token_ids is None:
            return is_kept, params
        prompt = self._digest(request, len(request.prompt_token_ids))
        return is_kept, self._tickets.sign(params, prompt=prompt, seconds=self._kv_lease_duration)

    def set_xfer_handshake_metadata(self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]) -> None:
        """Listen for decode servers, to tell them how to reach the workers.

        Raises:
            OptionError: the address cannot be listened on; vLLM's own wait for it would not end.
        """
        super().set_xfer_handshake_metadata(metadata)
        if self._refused is not None:
            why = os.strerror(self._refused.errno or 0)
            msg = (
                f"The side channel cannot listen on {self.side_channel_host}:{self.side_channel_port} ({why}): set "
                "VLLM_NIXL_SIDE_CHANNEL_PORT to a port that no other server of this host uses, and "
                "VLLM_NIXL_SIDE_CHANNEL_HOST to an address of this host."
            )
            raise OptionError(msg) from self._refused

    def _refusal(self, request: Request, params: dict[str, Any]) -> str | None:
        tokens = request.prompt_token_ids
        if tokens is None:
            return "the prompt has no token ids"
        host, port = params.get("remote_host"), params.get("remote_port")
        if not isinstance(host, str) or not isinstance(port, int) or not self._config.allows(host, port):
            return f"{host!r}:{port!r} is not among the peers of this server"
        # As many tokens as vLLM will read: blocks of a longer or shorter prompt would be taken for these.
        prompt = self._digest(request, self._get_remote_prefill_token_count(len(tokens)))
        return self._tickets.refusal(params, prompt=prompt)

    @staticmethod
    def _digest(request: Request, num_tokens: int) -> str:
        adapter = request.lora_request.lora_name if request.lora_request is not None else None
        return prompt_digest((request.prompt_token_ids or [])[:num_tokens], adapter, request.cache_salt)

    @staticmethod
    def _strip(request: Request, params: dict[str, Any], refusal: str) -> None:
        remote = {name: params.pop(name) for name in list(params) if name.startswith("remote_")}
        if any(remote.values()) or params.get("do_remote_prefill"):
            logger.warning("Request %s computes its prompt; of its kv_transfer_params, %s", request.request_id, refusal)
        params["do_remote_prefill"] = False

    def _nixl_handshake_listener(  # type: ignore[override]  # a static method of vLLM's, called on the instance
        self,
        encoded_data: dict[tuple[int, int], bytes],
        ready_event: threading.Event,
        stop_event: threading.Event,
        host: str,
        port: int,
    ) -> None:
        """Tell those who hold the secret how to reach our workers; whatever else arrives is dropped."""
        answer = functools.partial(answer_handshake, encoded_data)
        try:
            serve(f"tcp://{host}:{port}", self._keys, answer, ready=ready_event, stop=stop_event)
        except zmq.ZMQError as error:
            if ready_event.is_set():
                raise
            self._refused = error
            ready_event.set()  # vLLM waits for it


def answer_handshake(encoded_data: Mapping[tuple[int, int], bytes], request: bytes) -> list[bytes] | None:
    """Return what vLLM's client asks for, and the time here; None for whatever is no such question.

    Args:
        encoded_data: how to reach each worker, by pipeline and tensor parallel rank.
        request: msgpack of (b"get_meta_msg", pipeline rank, tensor parallel rank).
    """
    try:
        message, *ranks = msgspec.msgpack.decode(request, type=tuple[bytes, int, int])
    except msgspec.MsgspecError:
        return None
    data = encoded_data.get((ranks[0], ranks[1])) if message == GET_META_MSG else None
    return None if data is None else [data, msgspec.msgpack.encode(time.perf_counter())]
