"""The honest clients, of HTTP and of gRPC: stream completions at a steady rate and time their first
token."""

import asyncio
import json
import time
from dataclasses import dataclass, field

import grpc
import grpc.aio

from benchmarks.attacks.target import API_KEY, MODEL, Ports
from service.proto import inference_pb2 as pb
from service.proto import inference_pb2_grpc as pb_grpc

_BODY = json.dumps(
    {"model": MODEL, "prompt": "hello", "max_tokens": 4, "stream": True, "temperature": 0}
).encode()
_REQUEST = (
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    b"Authorization: Bearer %s\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s"
    % (API_KEY.encode(), len(_BODY), _BODY)
)
_MESSAGE = pb.GenerateRequest(
    model=MODEL, text=pb.Text(text="hello"), sampling=pb.SamplingParams(max_tokens=4, temperature=0)
)
_METADATA = (("authorization", f"Bearer {API_KEY}"),)
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


Experiences = dict[str, Experience]
"""By protocol."""


async def use_service(ports: Ports, duration_s: float, rate_per_s: float) -> Experiences:
    """Requests of each protocol at that rate, each on a connection of its own: new ones are what
    attackers deny."""
    asking = {"http": _ask, "grpc": _ask_grpc}
    experiences = {name: Experience() for name in asking}
    running: set[asyncio.Task[None]] = set()
    end_s = time.monotonic() + duration_s
    while time.monotonic() < end_s:
        for name, ask in asking.items():
            task = asyncio.create_task(ask(ports, experiences[name]))
            running.add(task)
            task.add_done_callback(running.discard)
            await asyncio.sleep(1 / rate_per_s / len(asking))
    await asyncio.gather(*running)
    return experiences


def merged(one: Experiences, other: Experiences) -> Experiences:
    return {name: experience + other[name] for name, experience in one.items()}


async def _ask_grpc(ports: Ports, experience: Experience) -> None:
    started_s = time.monotonic()
    own = (("grpc.use_local_subchannel_pool", 1),)
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{ports.grpc}", options=own) as channel:
            stub = pb_grpc.InferenceStub(channel)
            chunks = stub.GenerateStream(_MESSAGE, timeout=_TIMEOUT_S, metadata=_METADATA)
            ttft_s = None
            async for _ in chunks:
                ttft_s = ttft_s or time.monotonic() - started_s
        if ttft_s is None:
            experience.failures.append("no answer")
        else:
            experience.ttft_s.append(ttft_s)
    except grpc.aio.AioRpcError as error:
        experience.failures.append(f"{error.code().name}: {error.details()}")


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
