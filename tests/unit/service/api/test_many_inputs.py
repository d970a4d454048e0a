"""Requests for many embeddings: how many are under way at a time, and what ends them."""

import asyncio

import httpx
import pytest

from service.errors import ApiError, ApiErrorCode
from service.limits import Limits
from service.security.quota import KeyLimits
from tests.fakes.backend import MODEL_INFO

pytestmark = pytest.mark.asyncio
SIZE = MODEL_INFO.embedding.size


def watch_places(bench):
    """Returns what tells how many inputs were with the backend at a time, at most."""
    counts, submit = [0], bench.backend.submit

    async def watched(request, context):
        stream = await submit(request, context)
        counts.append(bench.backend.num_live)
        return stream

    bench.backend.submit = watched
    return lambda: max(counts)


NUM_MANY = 40


@pytest.fixture
def few_at_once(bench):
    bench.handler.limits = Limits(max_inputs_at_once=8)


@pytest.mark.usefixtures("few_at_once")
async def test_many_inputs_take_turns(client, bench):
    most = watch_places(bench)
    inputs = [[5 + i] for i in range(NUM_MANY)]
    answer = (await client.post("/v1/embeddings", json={"input": inputs})).json()
    assert [one["index"] for one in answer["data"]] == list(range(NUM_MANY))
    # The backend's vector begins with the number of tokens and their sum.
    assert [one["embedding"][:2] for one in answer["data"]] == [[1, 5 + i] for i in range(NUM_MANY)]
    assert answer["usage"]["prompt_tokens"] == NUM_MANY
    assert most() == 8
    assert len(bench.metrics.named("finished")) == NUM_MANY


@pytest.mark.usefixtures("few_at_once")
async def test_a_crowd_that_comes_meanwhile_costs_nothing_that_was_computed(client, bench):
    submit, refused = bench.backend.submit, []

    async def crowded(request, context):
        if bench.backend.num_live >= 3 and len(bench.backend.requests) >= 8:
            refused.append(request)
            raise ApiError(ApiErrorCode.OVERLOADED, "full")
        return await submit(request, context)

    bench.backend.submit = crowded
    body = {"input": [[5]] * NUM_MANY}
    response = await client.post("/v1/embeddings", json=body)
    assert response.status_code == 200
    assert len(response.json()["data"]) == NUM_MANY
    assert refused


@pytest.mark.usefixtures("few_at_once")
@pytest.mark.parametrize("code", [ApiErrorCode.OVERLOADED, ApiErrorCode.UNAVAILABLE])
async def test_inputs_that_nobody_takes_any_more_fail_the_request(client, bench, code):
    submit = bench.backend.submit

    async def leaving(request, context):
        if len(bench.backend.requests) >= 8:
            raise ApiError(code, "gone")
        return await submit(request, context)

    bench.backend.submit = leaving
    body = {"input": [[5]] * NUM_MANY}
    response = await client.post("/v1/embeddings", json=body)
    assert response.json()["error"]["code"] == code
    assert bench.backend.num_live == 0


@pytest.mark.usefixtures("few_at_once")
async def test_a_client_that_leaves_ends_all_of_its_inputs(app, bench):
    bench.backend.gate = asyncio.Semaphore(10)
    body = {"input": [[5]] * NUM_MANY}
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://tessera") as client:
        asking = asyncio.create_task(client.post("/v1/embeddings", json=body))
        async with asyncio.timeout(10):
            while len(bench.backend.requests) < 18:
                await asyncio.sleep(0)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    assert bench.backend.num_live == 0
    assert len(bench.backend.requests) == 18


async def test_an_answer_has_a_ceiling_of_values(client, bench):
    bench.handler.limits = Limits(max_embedding_values=3 * SIZE)
    for fields, status in (
        ({"input": ["a"] * 3}, 200),
        ({"input": ["a"] * 4}, 400),
        ({"input": ["a"] * 4, "dimensions": SIZE // 2}, 200),
    ):
        response = await client.post("/v1/embeddings", json=fields)
        assert response.status_code == status
    bench.handler.limits = Limits(max_embedding_values=3 * SIZE - 1)
    error = (await client.post("/v1/embeddings", json={"input": ["a"] * 3})).json()["error"]
    assert (error["code"], error["param"]) == ("limit_exceeded", "input")


async def test_a_key_embeds_as_many_inputs_at_a_time_as_it_may_run(client, bench, caller_quota):
    caller_quota(KeyLimits(max_concurrent_requests=2))
    most = watch_places(bench)
    for _ in range(2):
        response = await client.post("/v1/embeddings", json={"input": ["a"] * 7})
        assert len(response.json()["data"]) == 7
    assert most() == 2
