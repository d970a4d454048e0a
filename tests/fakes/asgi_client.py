"""A client on the bare ASGI side, which sees what is sent as it is sent, and may leave."""

import asyncio
import json


class AsgiClient:
    """Sends one request and then leaves when told to. path: with its query. body None: GET."""

    def __init__(self, app, path, body):
        path, _, query = path.partition("?")
        self.app = app
        self.body = b"" if body is None else json.dumps(body).encode()
        self.left = asyncio.Event()
        self.messages = []
        self.has_body = False
        self.accepts = asyncio.Event()
        self.accepts.set()
        self.scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "GET" if body is None else "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": query.encode(),
            "headers": [(b"content-type", b"application/json"), (b"host", b"tessera")],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
        }

    async def run(self):
        await self.app(self.scope, self._receive, self._send)

    async def _receive(self):
        if not self.has_body:
            self.has_body = True
            return {"type": "http.request", "body": self.body, "more_body": False}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message):
        await self.accepts.wait()
        self.messages.append(message)

    @property
    def events(self):
        """Data of the server-sent events so far."""
        text = b"".join(message.get("body", b"") for message in self.messages).decode()
        lines = [line for line in text.split("\n\n")[:-1] if line]
        return [json.loads(line.split("data: ", 1)[1]) for line in lines]
