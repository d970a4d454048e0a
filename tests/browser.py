"""A headless Chromium that a test drives as a person would, over the DevTools protocol.

Keys and pointer go through the browser's own input, what is seen is read from the document, and
everything the page asked for or complained of is kept. Needs aiohttp, which the service brings.
"""

import asyncio
import base64
import itertools
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

_START_TIMEOUT_S = 30.0
_ANSWER_TIMEOUT_S = 15.0
_POLL_S = 0.03
_KEYS = {"Enter": 13, "Escape": 27, "Tab": 9, "ArrowRight": 39, "ArrowLeft": 37, "End": 35}
_KEYS |= {"Home": 36, " ": 32}
_SHIFT = 8
_FLAGS = (
    "--headless",
    "--no-sandbox",  # tests may run as root, which its sandbox refuses
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--remote-debugging-port=0",
    "--hide-scrollbars",
)


class PageError(AssertionError):
    """The page did not do what the test waited for."""


class Browser:
    """One page of a running Chromium.

    requests: URLs that the page asked for. complaints: errors and warnings of its console, and
    exceptions that nobody caught.
    """

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._session = ""
        self.requests: list[str] = []
        self.complaints: list[str] = []

    async def attach(self) -> None:
        """Open an empty page and listen to it."""
        target = await self.send("Target.createTarget", url="about:blank")
        attached = await self.send(
            "Target.attachToTarget", targetId=target["targetId"], flatten=True
        )
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log", "Accessibility"):
            await self.send(f"{domain}.enable")

    async def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._ids)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        message = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        await self._socket.send_json(message)
        async with asyncio.timeout(_ANSWER_TIMEOUT_S):
            reply = await answer
        assert "error" not in reply, (method, reply["error"])
        return reply["result"]

    async def listen(self) -> None:
        """Take what the browser sends, until it is gone."""
        async for message in self._socket:
            told = json.loads(message.data)
            if "id" in told:
                self._answers.pop(told["id"]).set_result(told)
            else:
                self._note(told["method"], told["params"])

    def _note(self, event: str, told: dict[str, Any]) -> None:
        if event == "Network.requestWillBeSent":
            self.requests.append(told["request"]["url"])
        elif event == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
            self.complaints.append(told["entry"]["text"])
        elif event == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning"):
            self.complaints.append(str(told["args"]))
        elif event == "Runtime.exceptionThrown":
            self.complaints.append(str(told["exceptionDetails"]))

    async def resize(
        self, width: int, height: int, *, scale: float = 1, dark: bool = False
    ) -> None:
        await self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.send("Emulation.setEmulatedMedia", features=[scheme])

    async def open(self, url: str) -> None:
        await self.send("Page.navigate", url=url)
        await self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    async def read(self, expression: str) -> Any:
        """The value of an expression of the page's own document; promises are awaited."""
        reply = await self.send(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in reply, (expression, reply["exceptionDetails"])
        return reply["result"].get("value")

    async def until(self, condition: str, timeout_s: float = 60.0) -> Any:
        """Wait until an expression is true; its value."""
        end_s = asyncio.get_running_loop().time() + timeout_s
        while not (value := await self.read(condition)):
            if asyncio.get_running_loop().time() > end_s:
                text = await self.read("document.body.innerText")
                raise PageError(
                    f"not true in {timeout_s} s: {condition}\n{self.complaints}\n{text}"
                )
            await asyncio.sleep(_POLL_S)
        return value

    async def type(self, text: str) -> None:
        """Into whatever has the focus, a key at a time."""
        for character in text:
            await self.send("Input.dispatchKeyEvent", type="char", text=character)

    async def press(self, key: str, *, shift: bool = False) -> None:
        about = {
            "key": key,
            "code": "Space" if key == " " else key,
            "windowsVirtualKeyCode": _KEYS[key],
            "modifiers": _SHIFT if shift else 0,
        }
        written = {"Enter": "\r", " ": " "}.get(key)
        down = {"type": "keyDown", "text": written} if written else {"type": "rawKeyDown"}
        await self.send("Input.dispatchKeyEvent", **down, **about)
        await self.send("Input.dispatchKeyEvent", type="keyUp", **about)

    async def point_at(self, element: str) -> tuple[float, float]:
        """Move the pointer onto the middle of an element, an expression; where that is."""
        place = f"(e => {{ e.scrollIntoView({{block: 'nearest'}}); {_MIDDLE} }})({element})"
        x, y = await self.read(place)
        await self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        return x, y

    async def click(self, element: str) -> None:
        x, y = await self.point_at(element)
        for kind in ("mousePressed", "mouseReleased"):
            await self.send(
                "Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1
            )

    async def accessible(self) -> list[tuple[str, str]]:
        """Role and name of every node that a screen reader can be told."""
        nodes = (await self.send("Accessibility.getFullAXTree"))["nodes"]
        return [
            (node["role"]["value"], node.get("name", {}).get("value", ""))
            for node in nodes
            if not node["ignored"]
        ]

    async def screenshot(self, file: Path) -> None:
        shot = await self.send("Page.captureScreenshot", format="png")
        file.write_bytes(base64.b64decode(shot["data"]))


_MIDDLE = "const b = e.getClientRects()[0]; return [b.x + b.width / 2, b.y + b.height / 2];"


@asynccontextmanager
async def open_browser(program: Path, folder: Path) -> AsyncIterator[Browser]:
    """folder: for its profile."""
    process = await asyncio.create_subprocess_exec(
        program,
        *_FLAGS,
        f"--user-data-dir={folder}",
        "about:blank",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(_START_TIMEOUT_S):
            address = await _address(process.stderr)
        async with (
            aiohttp.ClientSession() as session,
            session.ws_connect(address, max_msg_size=0) as socket,
        ):
            browser = Browser(socket)
            listening = asyncio.create_task(browser.listen())
            await browser.attach()
            yield browser
            listening.cancel()
    finally:
        process.kill()
        await process.wait()


async def _address(output: asyncio.StreamReader) -> str:
    """Of the DevTools, which Chromium writes once it listens."""
    said = b""
    async for line in output:
        said += line
        if found := re.search(rb"ws://\S+", line):
            return found[0].decode()
    raise PageError(f"Chromium ended: {said.decode(errors='replace')}")
