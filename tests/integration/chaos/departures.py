"""Replicas that leave in the middle of long streams: a rolling upgrade, and a scale-down.

    tests/integration/isolated.sh python -m tests.integration.chaos.departures --stream-s 60

Real Ray, paced fake engines; every stream must be whole and right, and nobody may have waited for
the longest one. Exit status 1 if that was not so.
"""

import argparse
import asyncio
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tests.integration.chaos.applications import FAKE, VOCAB_SIZE, Answers, Application, Request
from tests.integration.chaos.clients import Clients, End, Outcome, Protocol

if TYPE_CHECKING:
    from service.config import ServeConfig

STEP_S = 0.05
NUM_STREAMS = 12
MAX_REQUESTS = 8
_CROWD_S = 6.0
_TIMEOUT_S = 120.0
ROOT = Path(__file__).parents[3]
UPGRADED = replace(FAKE, name="leave-upgrade", base_port=18730, num_replicas=2, cpus_per_rank=0.1)
SCALED = replace(FAKE, name="leave-scale", base_port=18740, num_replicas=2, cpus_per_rank=0.1)


@dataclass(frozen=True, slots=True)
class Departed:
    """gone_s: seconds from the order to leave until the engines that were to go were gone. left_s:
    that the longest stream then still had. moves: sequences that drains moved."""

    outcomes: list[Outcome]
    gone_s: float
    left_s: float
    num_moves: float

    def describe(self) -> str:
        whole = len(self.outcomes) - len(self.broken())
        return (
            f"{whole} of {len(self.outcomes)} streams whole, {self.num_moves:.0f} moved; engines "
            f"gone after {self.gone_s:.1f} s, {self.left_s:.1f} s before the longest stream's end"
        )

    def broken(self) -> list[str]:
        """What was not kept, one line each."""
        answers = Answers()
        return [
            f"{one.protocol}: {one.end} {one.code}, {len(one.token_ids)} tokens"
            for one in self.outcomes
            if one.end is not End.WHOLE
            or one.token_ids != answers.expected(one.application, one.request).token_ids
        ]


def upgrade(stream_s: float) -> Departed:
    """Every replica, ingresses included, is replaced while streams of stream_s run."""
    config = _config(UPGRADED, stream_s)
    _deploy(UPGRADED, config, max_running=256)
    lengths = [_num_tokens(stream_s)] * NUM_STREAMS
    changed = config.model_copy(
        update={"router": config.router.model_copy(update={"move_wait_s": 59.0})}
    )
    return asyncio.run(
        _leave(UPGRADED, lengths, 2, lambda: _deploy(UPGRADED, changed, max_running=256))
    )


def scale_down(stream_s: float) -> Departed:
    """Of two replicas one goes, by the service's own policy, when its short streams have ended."""
    config = _config(SCALED, stream_s)
    scaling = {
        "min_replicas": 1,
        "max_replicas": 2,
        "target_requests": MAX_REQUESTS,
        "upscale_delay_s": 0.2,
        "downscale_delay_s": 0.5,
    }
    data = config.model_dump(exclude_unset=True, exclude={"num_replicas"})
    from service.config import parse_config

    config = parse_config(data | {"autoscaling": scaling})
    _deploy(SCALED, config, MAX_REQUESTS)
    return asyncio.run(_scale_up_and_down(stream_s))


async def _scale_up_and_down(stream_s: float) -> Departed:
    async with Clients(SCALED, deadline_s=600) as clients:
        # More than one replica runs at a time: they are what asks for the second one, and what must
        # go on asking however long it takes to start.
        is_there = asyncio.Event()
        crowd = [
            asyncio.create_task(_send_until(is_there, clients, index))
            for index in range(2 * MAX_REQUESTS)
        ]
        try:
            await _until(lambda: _num_connected(SCALED) == 2)
        finally:
            is_there.set()
        departed = await _leave(SCALED, [_num_tokens(stream_s)] * (MAX_REQUESTS - 2), 1, None)
        return replace(departed, outcomes=departed.outcomes + sum(await asyncio.gather(*crowd), []))


async def _send_until(enough: asyncio.Event, clients: Clients, index: int) -> list[Outcome]:
    """One request after the other, of _CROWD_S each."""
    outcomes: list[Outcome] = []
    while not enough.is_set():
        outcomes.append(await _send(clients, index, _num_tokens(_CROWD_S)))
    return outcomes


async def _leave(
    application: Application, lengths: list[int], num_to_go: int, order: Callable[[], None] | None
) -> Departed:
    """order: what makes engines leave; None: they leave by themselves."""
    async with Clients(application, deadline_s=600) as clients:
        tasks = [_send(clients, index, num_tokens) for index, num_tokens in enumerate(lengths)]
        await asyncio.sleep(1.0)
        before, ordered_s = _engine_pids(application), time.monotonic()
        ordering = asyncio.create_task(asyncio.to_thread(order)) if order else None
        await _until(
            lambda: (
                len(before - _engine_pids(application)) >= num_to_go
                or all(task.done() for task in tasks)
            )
        )
        gone_s = time.monotonic()
        outcomes = list(await asyncio.gather(*tasks))
        num_moves = await asyncio.to_thread(_num_moves, application)
        if ordering is not None:
            await ordering
    last_s = max(one.ended_s for one in outcomes)
    return Departed(outcomes, gone_s - ordered_s, last_s - gone_s, num_moves)


def _send(clients: Clients, index: int, num_tokens: int) -> "asyncio.Task[Outcome]":
    rng = random.Random(f"{index}/{num_tokens}")
    prompt = [rng.randrange(4, VOCAB_SIZE) for _ in range(9)]
    protocol = [Protocol.HTTP_STREAM, Protocol.GRPC_STREAM][index % 2]
    return asyncio.create_task(clients.send(protocol, Request(0, prompt, num_tokens), None))


async def _until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + _TIMEOUT_S
    while not await asyncio.to_thread(condition):
        if time.monotonic() > end_s:
            raise TimeoutError
        await asyncio.sleep(0.1)


def _config(application: Application, stream_s: float) -> "ServeConfig":
    from service.config import parse_config

    settings = application.config.model_dump(exclude_unset=True)
    # An ingress must not end its clients' streams; an engine is not to take so long.
    return parse_config(settings | {"drain_timeout_s": 2 * stream_s + 60})


def _deploy(application: Application, config: "ServeConfig", max_running: int) -> None:
    """Returns when the application is ready."""
    from ray import serve

    from service.app import build_app
    from tests.fakes.engine_factory import FakeEngineFactory
    from tests.integration.services import is_ready, wait_until

    factory = FakeEngineFactory(step_s=STEP_S, vocab_size=VOCAB_SIZE, max_running=max_running)
    app = build_app(config, factory)
    serve.run(app, name=application.name, route_prefix=f"/{application.name}")
    wait_until(lambda: is_ready(application.url), 60)


def delete(application: Application) -> None:
    from ray import serve

    from service.deployments.control_plane import close_control_plane

    serve.delete(application.name)
    close_control_plane(application.name)


def _num_tokens(stream_s: float) -> int:
    return round(stream_s / STEP_S)


def _engine_pids(application: Application) -> set[int]:
    from tests.integration.services import replica_processes

    return {process.pid for process in replica_processes(application.name, "Engine")}


def _num_connected(application: Application) -> float:
    from tests.integration.chaos.healing import read_metric

    connected = read_metric(application, "tessera_connected_replicas")
    return min(connected) if len(connected) == application.num_ingresses else 0


def _num_moves(application: Application) -> float:
    import httpx

    time.sleep(1.5)  # until the last ones have been pushed
    text = httpx.get(application.metrics_url).text
    lines = (line for line in text.splitlines() if line.startswith("tessera_routing_decisions"))
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if 'reason="drain"' in line)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.integration.chaos.departures")
    parser.add_argument("--stream-s", type=float, default=60.0)
    stream_s = parser.parse_args().stream_s
    from tests.integration.chaos.__main__ import ENVIRONMENT

    os.environ.update(ENVIRONMENT)
    from tests.integration.ray_cluster import local_ray

    num_broken = 0
    with local_ray():
        for name, application, leave in (
            ("rolling upgrade", UPGRADED, upgrade),
            ("scale-down", SCALED, scale_down),
        ):
            departed = leave(stream_s)
            print(f"{name}, streams of {stream_s:.0f} s: {departed.describe()}", flush=True)
            for line in departed.broken():
                print(f"  BROKEN {line}", flush=True)
            num_broken += len(departed.broken()) + (departed.left_s <= 0)
            delete(application)
    print(f"{num_broken} broken promises")
    return 1 if num_broken else 0


if __name__ == "__main__":
    sys.exit(main())
