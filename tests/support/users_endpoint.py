"""A user's own route of the API server, as vLLM's interface of endpoint plugins wants it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastapi import FastAPI

__all__ = ["DeviceMemory"]


class DeviceMemory:
    """``GET /device_memory`` says what tensors hold of the device; the worker has ``tests.support.vital_signs.DeviceBytes``."""

    name = "device_memory"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Add the route."""
        app.get("/device_memory")(self.answer)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Keep what asks the engine."""
        self._engine = engine_client

    async def answer(self) -> dict[str, int]:
        """Ask the worker."""
        return {"bytes": sum(await self._engine.collective_rpc("device_bytes"))}
