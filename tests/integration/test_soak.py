"""Hundreds of requests of every kind, many of them rude: all end, nothing leaks.

Two thousand every night, which shows smaller leaks.
"""

import asyncio
import json
import random
from dataclasses import dataclass, field

import httpx
import pytest

from tests.integration.services import replica_processes, running_service, wait_until

NUM_CLIENTS = 24
SLOW_READER_TOKENS = 400
COLD_SHARE = 0.4  # of the requests: caches, pools and arenas are warm by then
MAX_RSS_GROWTH_BYTES = 24 << 20

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def service(ray_session):
    engine = {
        "num_pages": 600,
        "page_size": 4,
        "max_context_len": 512,
        "check_integrity_when_idle": True,
    }
    with running_service("soak", 18200, engine=engine) as running:
        yield running


@dataclass
class Tally:
    """How requests ended."""

    ends: dict[str, int] = field(default_factory=dict)
    rss_bytes: list[int] = field(default_factory=list)

    def count(self, end: str) -> None:
        self.ends[end] = self.ends.get(end, 0) + 1

    @property
    def total(self) -> int:
        return sum(self.ends.values())


def random_body(rng: random.Random) -> dict:
    """Any mixture of valid parameters; about one in twenty bodies is invalid."""
    body: dict = {
        "model": "builtin",
        "prompt": [rng.randrange(4, 4096) for _ in range(rng.choice([1, 3, 20, 60, 200]))],
        "max_tokens": rng.choice([1, 2, 8, 16, 40]),
        "temperature": rng.choice([0, 0.7, 1.0, 1.5]),
    }
    optional = {
        "top_p": 0.9,
        "top_k": 20,
        "min_p": 0.05,
        "seed": rng.randrange(1000),
        "n": 2,
        "logprobs": 3,
        "presence_penalty": 0.5,
        "repetition_penalty": 1.1,
        "logit_bias": {"17": -100},
        "stop": ["\n\n", "return"],
        "min_tokens": 1,
        "cache_salt": rng.choice("abc"),
        "priority": rng.randrange(3),
        "ignore_eos": True,
        "echo": True,
    }
    for name in rng.sample(sorted(optional), rng.randrange(4)):
        body[name] = optional[name]
    if rng.random() < 0.05:
        body.update(rng.choice([{"top_p": 7}, {"max_tokens": 100_000}, {"prompt": []}, {"wat": 1}]))
    return body


async def one_request(client: httpx.AsyncClient, rng: random.Random, tally: Tally) -> None:
    body, manner = random_body(rng), rng.random()
    if manner < 0.4:
        answer = await client.post("/v1/completions", json=body)
        assert answer.status_code in (200, 400), answer.text
        assert answer.status_code == 200 or answer.json()["error"]["message"]
        tally.count(f"http {answer.status_code}")
        return
    body["stream"] = True
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            assert answer.status_code == 400
            tally.count("http 400")
            return
        if manner < 0.7:
            tally.count("left early" if await read_some(answer, rng.randrange(6)) else "short")
            return
        lines = [line async for line in answer.aiter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert "error" not in json.loads(lines[-2][6:])
    tally.count("streamed")


async def read_some(answer: httpx.Response, num_lines: int) -> bool:
    """Read so many lines, then leave. True if the stream had not ended by itself."""
    async for line in answer.aiter_lines():
        if line == "data: [DONE]":
            return False
        num_lines -= bool(line)
        if num_lines < 0:
            return True
    return False


async def slow_reader(url: str) -> int:
    """Reads a few bytes at a time; returns how many events it saw until the stream ended."""
    body = {
        "model": "builtin",
        "prompt": "import os",
        "max_tokens": SLOW_READER_TOKENS,
        "stream": True,
        "ignore_eos": True,
    }
    num_events = 0
    async with (
        httpx.AsyncClient(base_url=url, timeout=600) as client,
        client.stream("POST", "/v1/completions", json=body) as answer,
    ):
        async for line in answer.aiter_lines():
            num_events += line.startswith("data: {")
            await asyncio.sleep(0.02)
    return num_events


def rss_bytes() -> int:
    """Resident bytes of the application's replicas."""
    return sum(process.memory_info().rss for process in replica_processes("soak"))


async def storm(url: str, num_requests: int, tally: Tally) -> int:
    todo = iter(range(num_requests))
    slow = asyncio.create_task(slow_reader(url))

    async def client_loop(seed: int) -> None:
        rng = random.Random(seed)
        async with httpx.AsyncClient(base_url=url, timeout=300) as client:
            for _ in todo:
                await one_request(client, rng, tally)
                if tally.total > COLD_SHARE * num_requests and tally.total % 50 == 0:
                    tally.rss_bytes.append(rss_bytes())

    await asyncio.gather(*(client_loop(seed) for seed in range(NUM_CLIENTS)))
    return await slow


def slope_per_sample(values: list[int]) -> float:
    """Least squares."""
    n, mean = len(values), sum(values) / len(values)
    middle = (n - 1) / 2
    numerator = sum((i - middle) * (value - mean) for i, value in enumerate(values))
    return numerator / sum((i - middle) ** 2 for i in range(n))


@pytest.mark.parametrize("num_requests", [300, pytest.param(2000, marks=pytest.mark.nightly)])
def test_every_request_ends_and_nothing_leaks(service, num_requests) -> None:
    pids = {process.pid for process in replica_processes("soak")}
    tally = Tally()
    num_slow_events = asyncio.run(storm(service.url, num_requests, tally))
    assert tally.total == num_requests
    assert min(tally.ends.values()) > 0
    assert {"http 200", "http 400", "left early", "streamed"} <= set(tally.ends)
    assert num_slow_events >= 1
    wait_until(lambda: service.metric("tessera_running_requests") == 0)
    wait_until(lambda: service.metric("tessera_live_requests") == 0)
    assert service.metric("tessera_waiting_requests") == 0
    assert service.metric("tessera_kv_pages_used") == 0
    # An engine whose accounting is broken when idle ends its replica.
    assert {process.pid for process in replica_processes("soak")} == pids
    growth_bytes = slope_per_sample(tally.rss_bytes) * len(tally.rss_bytes)
    print(tally.ends, f"RSS growth {growth_bytes / 2**20:.1f} MiB over {len(tally.rss_bytes)}")
    assert growth_bytes < MAX_RSS_GROWTH_BYTES


def test_the_service_still_answers_afterwards(service) -> None:
    answer = service.openai().completions.create(model="builtin", prompt="def ", max_tokens=4)
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 4
