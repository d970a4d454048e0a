"""Both APIs called without a socket: a client would hold the loop itself."""

import asyncio

from service.request_context import RequestContext
from service.security.quota import FreeLease

_JSON = "application/json"
_CHUNK_BYTES = 64 << 10


class Called:
    """An ASGI application."""

    def __init__(self, app):
        self._app = app

    async def post(self, path, body, content_type=_JSON):
        """Bodies other than JSON come in pieces, all of which are there already."""
        return await self._call("POST", path, body, content_type=content_type)

    async def post_and_forget(self, path, body):
        """As post(), of an answer that is too large to be kept: its first and last parts."""
        return await self._call("POST", path, body, forgets=True)

    async def get(self, path, query=b""):
        return await self._call("GET", path, b"", query)

    async def _call(self, method, path, body, query=b"", forgets=False, content_type=_JSON):
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": query,
            "headers": [(b"content-type", content_type.encode())],
            "client": ("127.0.0.1", 1),
            "server": ("tessera", 80),
            "scheme": "http",
            "root_path": "",
            "http_version": "1.1",
        }
        size = max(len(body), 1) if content_type == _JSON else _CHUNK_BYTES
        pieces = [body[at : at + size] for at in range(0, len(body), size)] or [b""]
        messages = [{"type": "http.request", "body": one, "more_body": True} for one in pieces]
        messages[-1]["more_body"] = False
        messages.reverse()
        sent = []

        async def receive():
            if not messages:
                await asyncio.Event().wait()
            return messages.pop()

        async def send(message):
            sent.append(message)
            if forgets and len(sent) > 8:
                del sent[4]

        await self._app(scope, receive, send)
        parts = [message.get("body", b"") for message in sent[1:]]
        # A hundred megabytes, which no server would put together.
        return sent[0]["status"], await asyncio.to_thread(b"".join, parts)


class UnconnectedCall:
    """What a method of gRPC is given instead of a connection. answer: the last one, as bytes."""

    def __init__(self):
        self.context, self.lease, self.answer = RequestContext(), FreeLease(), None

    async def write(self, answer):
        self.answer = answer.SerializeToString()

    async def write_bytes(self, answer):
        self.answer = answer
