"""The honest client: streams completions at a steady rate and times their first token."""

import asyncio
import json
import time
from dataclasses import dataclass, field

from benchmarks.attacks.target import API_KEY, MODEL, Ports

_BODY = json.dumps(
    {"model": MODEL, "prompt": "hello", "max_tokens": 4, "stream": True, "temperature": 0}
).encode()
_REQUEST = (
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    b"Authorization: Bearer %s\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s"
    % (API_KEY.encode(), len(_BODY), _BODY)
)
_TIMEOUT_S = 30.0


@dataclass
class Experience:
    """ttft_s: of requests that were answered in full. failures: what became of the others."""

    ttft_s: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def percentile_ms(self, percent: float) -> float:
        """NaN if nothing was answered."""
        ranked = sorted(self.ttft_s)
        if not ranked:
            return float("nan")
        return 1e3 * ranked[min(len(ranked) - 1, int(len(ranked) * percent / 100))]

    def __add__(self, other: "Experience") -> "Experience":
        return Experience(self.ttft_s + other.ttft_s, self.failures + other.failures)


async def use_service(ports: Ports, duration_s: float, rate_per_s: float) -> Experience:
    """Each request on a connection of its own: new ones are what attackers deny."""
    experience = Experience()
    running: set[asyncio.Task[None]] = set()
    end_s = time.monotonic() + duration_s
    while time.monotonic() < end_s:
        task = asyncio.create_task(_ask(ports, experience))
        running.add(task)
        task.add_done_callback(running.discard)
        await asyncio.sleep(1 / rate_per_s)
    await asyncio.gather(*running)
    return experience


async def _ask(ports: Ports, experience: Experience) -> None:
    started_s = time.monotonic()
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", ports.http)
            try:
                writer.write(_REQUEST)
                ttft_s = await _first_token_s(reader, started_s)
                rest = await reader.read()
            finally:
                writer.close()
        if b"[DONE]" in rest:
            experience.ttft_s.append(ttft_s)
        else:
            experience.failures.append("cut off")
    except (OSError, asyncio.IncompleteReadError, ValueError) as error:
        experience.failures.append(f"{type(error).__name__}: {error}")


async def _first_token_s(reader: asyncio.StreamReader, started_s: float) -> float:
    status = await reader.readline()
    if b" 200 " not in status:
        raise ValueError(f"answered {status!r}")
    while b'"text"' not in await reader.readuntil(b"\n"):
        pass
    return time.monotonic() - started_s
