"""kill -9 under load, with the real engine on two ranks a replica: what the client sees."""

import asyncio
import json
import os
import signal
import time
from dataclasses import dataclass

import httpx
import psutil
import pytest

from tests.integration.services import replica_processes, running_service, wait_until

NAME = "chaos"
NUM_STREAMS = 16
NUM_TOKENS = 80

pytestmark = [pytest.mark.nightly, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def service(ray_session):
    settings = {
        "num_replicas": 2,
        "engine": {"tp_size": 2, "kv_cache_bytes": 64 << 20, "check_integrity_when_idle": True},
        "channel": {"heartbeat_timeout_s": 2.0},
    }
    with running_service(NAME, 18970, **settings) as running:
        wait_until(lambda: running.metric("tessera_connected_replicas") == 2, 60)
        yield running


@dataclass
class Outcome:
    """What one streaming client saw."""

    num_tokens: int = 0
    num_errors: int = 0
    error_code: str = ""
    is_done: bool = False


async def stream(client: httpx.AsyncClient, index: int) -> Outcome:
    body = {
        "model": "builtin",
        "prompt": [4 + index] * (8 + index),
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "return_token_ids": True,
    }
    outcome = Outcome()
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            error = json.loads(await answer.aread())["error"]
            return Outcome(num_errors=1, error_code=error["code"])
        async for line in answer.aiter_lines():
            if line == "data: [DONE]":
                outcome.is_done = True
            elif line.startswith("data: "):
                event = json.loads(line[6:])
                if "error" in event:
                    outcome.num_errors += 1
                    outcome.error_code = event["error"]["code"]
                else:
                    for choice in event["choices"]:
                        outcome.num_tokens += len(choice["token_ids"])
    return outcome


async def storm(url: str, kill) -> list[Outcome]:
    """Streams under way when kill() comes, and streams that start around it."""
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        tasks = [asyncio.create_task(stream(client, index)) for index in range(NUM_STREAMS)]
        await asyncio.sleep(0.6)
        tasks += [asyncio.create_task(stream(client, index)) for index in range(8)]
        kill()
        return await asyncio.gather(*tasks)


def check(service, outcomes: list[Outcome]) -> None:
    """Every stream ended whole, and some of them at another replica than their first."""
    for outcome in outcomes:
        assert outcome == Outcome(num_tokens=NUM_TOKENS, is_done=True)
    wait_until(lambda: num_moved(service) > 0, 10)


def num_moved(service) -> float:
    lines = httpx.get(service.metrics_url).text.splitlines()
    lost = [line for line in lines if "routing_decisions_total" in line and 'reason="lost"' in line]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lost)


def engine_pids() -> set[int]:
    return {process.pid for process in replica_processes(NAME, "Engine")}


def rank_processes() -> list[psutil.Process]:
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if "RankProcess" in " ".join(process.info["cmdline"] or [])
    ]


def wait_until_whole(service, before: set[int]) -> None:
    start_s = time.monotonic()
    wait_until(lambda: len(engine_pids()) == 2 and engine_pids() != before, 90)
    wait_until(lambda: service.metric("tessera_connected_replicas") == 2, 90)
    wait_until(lambda: len(rank_processes()) == 2, 30)
    print(f"whole again after {time.monotonic() - start_s:.1f} s")


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def test_a_killed_replica_loses_no_stream(service) -> None:
    before = engine_pids()
    check(service, asyncio.run(storm(service.url, lambda: kill(min(before)))))
    wait_until_whole(service, before)


def test_a_killed_rank_ends_its_replica_and_nothing_else(service) -> None:
    before = engine_pids()
    check(service, asyncio.run(storm(service.url, lambda: kill(rank_processes()[0].pid))))
    wait_until_whole(service, before)
    assert len(before & engine_pids()) == 1


def test_the_healed_service_answers(service) -> None:
    outcomes = asyncio.run(storm(service.url, lambda: None))
    assert all(outcome.is_done and outcome.num_tokens for outcome in outcomes)
    wait_until(lambda: service.metric("tessera_kv_pages_used") == 0)
