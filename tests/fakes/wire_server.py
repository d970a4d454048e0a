"""An HTTP server on a small application, and raw connections to it."""

import asyncio

from service.deployments.listeners import HttpServer, bind_shared
from service.security.connections import HttpConnectionLimits

GET = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
CLOSE = b"\r\nConnection: close\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nHost: a\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
FAST = HttpConnectionLimits(
    head_timeout_s=0.6, body_timeout_s=0.6, write_timeout_s=1.0, min_bytes_per_s=100_000
)


class App:
    """Reads a body and answers with its length, or with so many bytes."""

    def __init__(self, num_answer_bytes=0):
        self.num_answer_bytes = num_answer_bytes
        self.num_requests = 0
        self.trailing = []
        self.ends = []

    async def __call__(self, scope, receive, send):
        self.num_requests += 1
        num_bytes, message = 0, {"more_body": True}
        while message.get("more_body"):
            message = await receive()
            if message["type"] == "http.disconnect":
                self.ends.append("left")
                return
            num_bytes += len(message["body"])
        self.trailing = [name for name, _ in scope["headers"] if name.startswith(b"x-late")]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        body = b"x" * self.num_answer_bytes or b"%d bytes" % num_bytes
        for start in range(0, len(body), 1 << 16):
            part = body[start : start + (1 << 16)]
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        self.ends.append("answered")


class Server:
    def __init__(self, app, limits=None, keep_alive_timeout_s=60):
        self.server = HttpServer(app, keep_alive_timeout_s, 5, limits=limits)

    async def __aenter__(self):
        listener = bind_shared("127.0.0.1", 0)
        self.address = listener.getsockname()
        await self.server.start(listener)
        return self

    async def __aexit__(self, *_):
        await self.server.stop()

    async def connect(self, *parts):
        reader, writer = await asyncio.open_connection(*self.address)
        for part in parts:
            writer.write(part)
        await writer.drain()
        return reader, writer

    async def until(self, num_connections):
        async with asyncio.timeout(60):
            while self.server.num_connections != num_connections:
                await asyncio.sleep(0.02)

    async def until_empty(self):
        await self.until(0)
