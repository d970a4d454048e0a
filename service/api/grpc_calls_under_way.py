"""The gRPC calls of known callers that have not been answered to the last byte.

A request ends here when its last token is there; its call ends when gRPC has put all of the answer
on its way, which lasts for as long as its client reads slowly.
"""

import asyncio
from typing import Any

import grpc.aio


class CallsUnderWay:
    """Use from one event loop."""

    def __init__(self) -> None:
        self._calls: set[asyncio.Future[None]] = set()

    def __len__(self) -> int:
        return len(self._calls)

    def enter(self, rpc: "grpc.aio.ServicerContext[Any, Any]") -> None:
        """A call that leaves by itself when gRPC is done with it, or its client has gone."""
        call: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        # The stubs ask for a class of theirs; gRPC takes any function.
        rpc.add_done_callback(lambda _: call.set_result(None))  # type: ignore[arg-type]

    async def wait(self, timeout_s: float) -> int:
        """Until the calls that there are now have ended; returns how many have not by then."""
        calls = set(self._calls)
        if not calls:
            return 0
        _, pending = await asyncio.wait(calls, timeout=timeout_s)
        return len(pending)
