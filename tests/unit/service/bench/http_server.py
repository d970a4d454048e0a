"""A tiny OpenAI-shaped server that misbehaves on request, on a free port of this machine.

What it does depends on max_tokens, the one thing a benchmark's request says about itself.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn

OVERLOADED = 101
PLAIN_TEXT_ERROR = 102
ERROR_IN_STREAM = 103
CUT_SHORT = 104
NO_USAGE = 105
GARBAGE = 106


class FakeOpenAi:
    """Streams max_tokens tokens, tokens_per_chunk in each, with step_s between."""

    def __init__(self, *, step_s: float = 0.0, tokens_per_chunk: int = 1) -> None:
        self.step_s = step_s
        self.tokens_per_chunk = tokens_per_chunk
        self.has_continuous_usage = True
        self.bodies: list[dict] = []
        self.paths: list[str] = []
        self.headers: list[dict[bytes, bytes]] = []
        self.models: list[dict] = [{"id": "fake", "max_model_len": 512, "vocab_size": 1000}]

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http":
            return
        self.headers.append(dict(scope["headers"]))
        if scope["path"] == "/v1/models":
            await self._respond(send, 200, json.dumps({"data": self.models}).encode())
            return
        raw = b""
        while True:
            message = await receive()
            raw += message.get("body", b"")
            if not message.get("more_body"):
                break
        body = json.loads(raw)
        self.bodies.append(body)
        self.paths.append(scope["path"])
        await self._generate(body, send)

    async def _generate(self, body: dict, send) -> None:
        kind = body["max_tokens"]
        if kind == OVERLOADED:
            error = {"error": {"message": "try later", "code": "overloaded", "type": "x"}}
            await self._respond(send, 429, json.dumps(error).encode())
        elif kind == PLAIN_TEXT_ERROR:
            await self._respond(send, 502, b"bad gateway")
        else:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            async for event in self._events(body, kind):
                chunk = b"data: " + event + b"\n\n"
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self, body: dict, kind: int) -> AsyncIterator[bytes]:
        is_chat = "messages" in body
        num_prompt = len(str(body["messages"])) if is_chat else len(body["prompt"])
        num_done = 0
        while num_done < body["max_tokens"]:
            await asyncio.sleep(self.step_s)
            num_done = min(num_done + self.tokens_per_chunk, body["max_tokens"])
            text = {"delta": {"content": "a"}} if is_chat else {"text": "a"}
            is_last = num_done == body["max_tokens"] and kind != CUT_SHORT
            choice = {"index": 0, **text, "finish_reason": "length" if is_last else None}
            chunk: dict = {"choices": [choice]}
            if self.has_continuous_usage and kind != NO_USAGE:
                chunk["usage"] = self._usage(num_prompt, num_done)
            yield json.dumps(chunk).encode()
            if kind == ERROR_IN_STREAM:
                yield json.dumps({"error": {"message": "lost", "code": "replica_lost"}}).encode()
                return
            if kind == GARBAGE:
                yield b"{no json"
        if kind != NO_USAGE:
            yield json.dumps({"choices": [], "usage": self._usage(num_prompt, num_done)}).encode()
        yield b"[DONE]"

    @staticmethod
    def _usage(num_prompt: int, num_done: int) -> dict:
        details = {"cached_tokens": num_prompt // 2}
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_done,
            "total_tokens": num_prompt + num_done,
            "prompt_tokens_details": details,
        }

    @staticmethod
    async def _respond(send, status: int, body: bytes) -> None:
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})


@asynccontextmanager
async def serving(app: FakeOpenAi) -> AsyncIterator[str]:
    """Serve in this event loop; yields the URL."""
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", lifespan="off")
    server = uvicorn.Server(config)
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.005)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        await task
