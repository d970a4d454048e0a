"""A changed configuration is rolled out under load: no request fails, none is cut."""

import asyncio
import itertools
import random
from dataclasses import replace

import pytest
from ray import serve

from service.app import build_app
from service.deployments.control_plane import close_control_plane
from tests.fakes.engine_factory import FakeEngineFactory
from tests.integration.chaos.applications import (
    FAKE,
    VOCAB_SIZE,
    Answers,
    draw_request,
)
from tests.integration.chaos.clients import Clients, End, Outcome, Protocol
from tests.integration.services import is_ready, replica_processes, wait_until

NAME = "rolling"
NUM_STREAMS = 30
STEP_S = 0.03
BEFORE_S = 2.0
AFTER_S = 2.0
APPLICATION = replace(
    FAKE, name=NAME, base_port=18720, num_replicas=2, cpus_per_rank=0.1, max_tokens=(5, 90)
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def deploy(move_wait_s: float) -> None:
    """Blocks until Serve has rolled every replica."""
    config = APPLICATION.config
    router = config.router.model_copy(update={"move_wait_s": move_wait_s})
    factory = FakeEngineFactory(step_s=STEP_S, vocab_size=VOCAB_SIZE)
    app = build_app(config.model_copy(update={"router": router}), factory)
    serve.run(app, name=NAME, route_prefix=f"/{NAME}")


@pytest.fixture
def service(ray_session):
    deploy(move_wait_s=30.0)
    wait_until(lambda: is_ready(APPLICATION.url), 60)
    yield
    serve.delete(NAME)
    close_control_plane(NAME)


def replica_pids() -> set[int]:
    return {process.pid for process in replica_processes(NAME)}


async def keep_one_going(
    clients: Clients, slot: int, is_over: asyncio.Event, outcomes: list[Outcome]
) -> None:
    rng = random.Random(slot)
    for protocol in itertools.islice(itertools.cycle(Protocol), slot % len(Protocol), None):
        if is_over.is_set():
            return
        request = draw_request(APPLICATION, rng)
        outcome = await clients.send(protocol, request, None)
        while outcome.has_crossed_a_goodbye:
            outcome = await clients.send(protocol, request, None)
        outcomes.append(outcome)


async def upgrade_under_load() -> list[Outcome]:
    outcomes: list[Outcome] = []
    is_over = asyncio.Event()
    async with Clients(APPLICATION, deadline_s=60) as clients:
        load = [
            asyncio.create_task(keep_one_going(clients, slot, is_over, outcomes))
            for slot in range(NUM_STREAMS)
        ]
        await asyncio.sleep(BEFORE_S)
        await asyncio.to_thread(deploy, 29.0)
        await asyncio.sleep(AFTER_S)
        is_over.set()
        await asyncio.gather(*load)
    return outcomes


def expected_tokens(outcome: Outcome) -> list[int]:
    return Answers().expected(APPLICATION, outcome.request).token_ids


def test_no_request_fails_while_every_replica_is_replaced(service):
    before = replica_pids()
    outcomes = asyncio.run(upgrade_under_load())
    wait_until(lambda: not (before & replica_pids()), 60)
    assert len(outcomes) > 3 * NUM_STREAMS
    failed = [
        one for one in outcomes if one.end is not End.WHOLE or one.token_ids != expected_tokens(one)
    ]
    for one in failed:
        took_s = one.ended_s - one.started_s
        print(f"{one.protocol}, {len(one.token_ids)} tokens, {took_s:.1f} s: {one.end} {one.code}")
    print(f"{len(outcomes)} requests, {len(failed)} failed")
    assert failed == []
