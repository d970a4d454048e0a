"""The child processes of benchmarks/serve_overhead.py: a client of a server, or an engine alone.

    python -m benchmarks.overhead_process < PLAN

Reads one JSON line, a Plan; says `ready` when connected; then, for each line with a seed and the
name of a level, runs it and answers with one line, the RunRecord as JSON. Ends with its standard
input.
"""

import asyncio
import sys
from typing import Literal

import msgspec

from benchmarks.overhead_levels import Level, Share, fresh_settings, run_level
from service.bench.engine_transport import EngineTransport, engine_factory
from service.bench.grpc_transport import GrpcTransport
from service.bench.http_transport import HttpTransport
from service.bench.profile.command import engine_config
from service.bench.transport import Transport
from tests.fakes.engine import FakeEngine

READY = "ready"


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """way "engine": the engine in this process, of `model` with `engine_options`, or a fake one.

    fake_step_s: pace of the fake engine; None loads the real one. address: of the server.
    """

    way: Literal["engine", "http", "grpc"]
    levels: list[Level]
    vocab_size: int
    share: Share = Share()
    address: str = ""
    model: str = "builtin"
    engine_options: list[str] = []
    fake_step_s: float | None = None


def make_transport(plan: Plan) -> Transport:
    settings = fresh_settings()
    match plan.way:
        case "http":
            return HttpTransport(plan.address, settings)
        case "grpc":
            return GrpcTransport(plan.address, settings)
        case "engine":
            if plan.fake_step_s is not None:
                fake = FakeEngine(step_s=plan.fake_step_s, vocab_size=plan.vocab_size)
                return EngineTransport(lambda: fake, settings)
            config = engine_config(plan.model, plan.engine_options)
            return EngineTransport(engine_factory(config), settings)


async def serve_commands(plan: Plan) -> None:
    """Run what standard input asks for, one after the other."""
    levels = {level.name: level for level in plan.levels}
    transport = make_transport(plan)
    await transport.connect()
    print(READY, flush=True)
    try:
        while command := (await asyncio.to_thread(sys.stdin.readline)).strip():
            seed, _, name = command.partition(" ")
            record = await run_level(
                levels[name], plan.vocab_size, int(seed), transport, plan.share
            )
            print(msgspec.json.encode(record).decode(), flush=True)
    finally:
        await transport.aclose()


if __name__ == "__main__":
    asyncio.run(serve_commands(msgspec.json.decode(sys.stdin.readline(), type=Plan)))
