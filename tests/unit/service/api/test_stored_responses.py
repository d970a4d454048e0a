"""Responses that are stored: what follows them, who sees them, how they are stopped and deleted."""

import asyncio
import json
from contextlib import asynccontextmanager
from dataclasses import replace

import openai
import pytest

from service.errors import ApiError, ApiErrorCode
from service.response_store.records import StoreLimits
from service.response_store.runs import Runs
from service.response_store.store import LocalResponseStore
from service.security.callers import ANONYMOUS
from service.security.quota import KeyLimits, make_quota
from tests.fakes.asgi_client import AsgiClient
from tests.fakes.backend import make_failure, make_outputs
from tests.fakes.chats import PARAMETERS
from tests.fakes.text import ANSWER
from workers.errors import ErrorCode

pytestmark = pytest.mark.asyncio

WEATHER = {"type": "function", "name": "weather", "parameters": PARAMETERS}
LIMITS = StoreLimits(100, 1 << 20, 1 << 18, 100.0)


class Switched:
    """Who calls is what a test says."""

    def __init__(self):
        self.caller = ANONYMOUS

    def identify(self, authorization):
        return self.caller


@pytest.fixture
def store():
    return LocalResponseStore(LIMITS)


@pytest.fixture
def services(services, store):
    return replace(
        services, responses=Runs("here", store, LIMITS.max_response_bytes), authenticator=Switched()
    )


@pytest.fixture
def gpt(openai_client):
    return openai_client.responses


def prompt_of(bench):
    return bench.tokenizer.encoder.decode(
        bench.backend.requests[-1].prompt_token_ids, skip_special_tokens=False
    )


async def test_a_response_follows_all_that_came_before_but_instructions(gpt, bench):
    first = await gpt.create(model="tiny", input="one", instructions="be kind")
    second = await gpt.create(model="tiny", input="two", previous_response_id=first.id)
    third = await gpt.create(
        model="tiny", input=[{"role": "user", "content": "three"}], previous_response_id=second.id
    )
    prompt = prompt_of(bench)
    said = [prompt.index(f"<|im_start|>user\n{word}<|im_end|>") for word in ("one", "two", "three")]
    assert said == sorted(said)
    assert prompt.count("hello world") == 2
    assert "be kind" not in prompt
    assert third.previous_response_id == second.id
    await gpt.delete(first.id)
    await gpt.create(model="tiny", input="four", previous_response_id=second.id)
    assert "<|im_start|>user\none<|im_end|>" in prompt_of(bench)


async def test_a_stored_response_is_what_was_answered(gpt, client):
    created = await gpt.create(model="tiny", input="one", metadata={"a": "b"})
    assert (await gpt.retrieve(created.id)).to_dict() == created.to_dict()
    assert created.to_dict()["store"] is True
    deleted = await gpt.delete(created.id)
    assert deleted is None
    with pytest.raises(openai.NotFoundError) as raised:
        await gpt.retrieve(created.id)
    assert raised.value.code == "response_not_found"
    again = await client.delete(f"/v1/responses/{created.id}")
    assert again.status_code == 404


async def test_a_streamed_response_is_seen_from_the_beginning_and_kept_before_its_end(
    app, gpt, bench
):
    bench.backend.gate = asyncio.Semaphore(3)
    asked = {"model": "tiny", "input": "one", "stream": True}
    async with streaming(app, asked) as streamed:
        await until(lambda: any("delta" in event["type"] for event in streamed.events))
        response_id = streamed.events[0]["response"]["id"]
        begun = await gpt.retrieve(response_id)
        assert (begun.status, begun.output) == ("in_progress", [])
        with pytest.raises(openai.BadRequestError, match="cancel it first"):
            await gpt.delete(response_id)
        with pytest.raises(openai.BadRequestError, match="has not ended"):
            await gpt.create(model="tiny", input="x", previous_response_id=response_id)
        bench.backend.gate.release()
        for _ in range(99):
            bench.backend.gate.release()
        await until(lambda: streamed.events[-1]["type"] == "response.completed")
        kept = await gpt.retrieve(response_id)
    assert kept.to_dict() == streamed.events[-1]["response"]
    assert (kept.status, kept.output_text) == ("completed", ANSWER)


async def test_what_is_not_to_be_stored_is_not(gpt, store):
    created = await gpt.create(model="tiny", input="one", store=False)
    async with gpt.stream(model="tiny", input="one", store=False) as stream:
        streamed = await stream.get_final_response()
    for response in (created, streamed):
        assert response.to_dict()["store"] is False
        with pytest.raises(openai.NotFoundError):
            await gpt.retrieve(response.id)
    assert store._shelf.num_responses == 0


async def test_what_is_too_large_to_be_stored_is_answered_and_says_so(gpt, store):
    store.limit(replace(LIMITS, max_response_bytes=1 << 10))
    created = await gpt.create(model="tiny", input="x" * 300)
    assert created.output_text
    assert created.to_dict()["store"] is False
    assert store._shelf.num_responses == 0


async def test_input_items_come_in_pages(gpt):
    turns = [{"role": "user", "content": f"turn {n}"} for n in range(5)]
    first = await gpt.create(model="tiny", input="before")
    created = await gpt.create(model="tiny", input=turns, previous_response_id=first.id)
    shown = [item async for item in gpt.input_items.list(created.id, limit=2, order="asc")]
    assert [item.content[0].text for item in shown] == [turn["content"] for turn in turns]
    assert {(item.type, item.role, item.status) for item in shown} == {
        ("message", "user", "completed")
    }
    assert len({item.id for item in shown}) == 5
    page = await gpt.input_items.list(created.id, limit=2)
    assert [item.content[0].text for item in page.data] == ["turn 4", "turn 3"]
    assert page.has_more
    with pytest.raises(openai.BadRequestError, match="after"):
        await gpt.input_items.list(created.id, after="nothing")


async def test_references_stand_for_items_that_are_stored(gpt, bench):
    created = await gpt.create(model="tiny", input="one")
    (asked,) = (await gpt.input_items.list(created.id)).data
    user = {"role": "user", "content": "two"}
    references = [
        {"type": "item_reference", "id": asked.id},
        {"id": created.output[0].id},
    ]
    await gpt.create(model="tiny", input=[*references, user])
    prompt = prompt_of(bench)
    assert prompt.index("one<|im_end|>") < prompt.index("hello world") < prompt.index("two<|im_end")
    for missing in ("msg_1", created.output[0].id[:-1] + "9", f"msg_{'0' * 48}_0"):
        with pytest.raises(openai.NotFoundError) as raised:
            await gpt.create(model="tiny", input=[{"type": "item_reference", "id": missing}])
        assert (raised.value.code, raised.value.param) == ("response_not_found", "input")


async def test_nobody_sees_what_another_key_has_stored(gpt, services, client):
    def call_as(name):
        services.authenticator.caller = replace(ANONYMOUS, name=name, tenant=name)

    call_as("a")
    created = await gpt.create(model="tiny", input="one")
    call_as("b")
    for path, method in (("", "GET"), ("", "DELETE"), ("/cancel", "POST"), ("/input_items", "GET")):
        answer = await client.request(method, f"/v1/responses/{created.id}{path}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "response_not_found")
    for asked in (
        {"input": "x", "previous_response_id": created.id},
        {"input": [{"type": "item_reference", "id": created.output[0].id}]},
    ):
        with pytest.raises(openai.NotFoundError):
            await gpt.create(model="tiny", **asked)
    call_as("a")
    assert (await gpt.retrieve(created.id)).id == created.id


async def test_a_place_of_one_model_shows_that_models_responses(gpt, client):
    created = await gpt.create(model="tiny", input="one")
    assert (await client.get(f"/models/tiny/v1/responses/{created.id}")).status_code == 200
    items = await client.get(f"/models/tiny/v1/responses/{created.id}/input_items")
    assert items.json()["data"][0]["content"][0]["text"] == "one"


async def test_looking_counts_against_the_keys_requests(gpt, client, services):
    created = await gpt.create(model="tiny", input="one")
    services.authenticator.caller = replace(
        ANONYMOUS, quota=make_quota("key", KeyLimits(requests_per_minute=1), lambda: 0.0)
    )
    answers = [await client.get(f"/v1/responses/{created.id}") for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 429]


async def test_a_running_response_is_stopped_from_another_call(app, client, services, bench):
    following = asyncio.create_task(services.responses.follow())
    bench.backend.gate = asyncio.Semaphore(3)
    asked = {"model": "tiny", "input": "x", "stream": True}
    async with streaming(app, asked) as streamed:
        await until(lambda: any("delta" in event["type"] for event in streamed.events))
        response_id = streamed.events[0]["response"]["id"]
        answer = await client.post(f"/v1/responses/{response_id}/cancel")
        await until(lambda: streamed.events[-1]["type"] == "response.incomplete")
    following.cancel()
    cancelled = answer.json()
    assert (answer.status_code, cancelled["status"]) == (200, "cancelled")
    assert streamed.events[-1]["response"] == cancelled
    assert ANSWER.startswith(cancelled["output"][0]["content"][0]["text"])
    assert bench.backend.streams[0].is_aborted
    again = await client.post(f"/v1/responses/{response_id}/cancel")
    assert (again.status_code, again.json()) == (200, cancelled)


async def test_what_has_ended_cannot_be_cancelled(gpt, client):
    created = await gpt.create(model="tiny", input="one")
    answer = await client.post(f"/v1/responses/{created.id}/cancel")
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request")


async def test_a_client_that_leaves_its_stream_has_it_stopped(app, gpt, bench):
    bench.backend.gate = asyncio.Semaphore(3)
    async with streaming(app, {"model": "tiny", "input": "x", "stream": True}) as streamed:
        await until(lambda: any("delta" in event["type"] for event in streamed.events))
    assert bench.backend.streams[0].is_aborted
    kept = await gpt.retrieve(streamed.events[0]["response"]["id"])
    assert (kept.status, kept.output[0].status) == ("cancelled", "incomplete")
    assert ANSWER.startswith(kept.output_text)


async def test_a_response_whose_process_is_gone_has_failed(gpt, store, services, app, bench):
    bench.backend.gate = asyncio.Semaphore(3)
    async with streaming(app, {"model": "tiny", "input": "x", "stream": True}) as streamed:
        await until(lambda: any("delta" in event["type"] for event in streamed.events))
        response_id = streamed.events[0]["response"]["id"]
        store._shelf._runners.clear()
        lost = await gpt.retrieve(response_id)
        assert (lost.status, lost.error.type) == ("failed", "replica_lost")
        await gpt.delete(response_id)


async def test_a_failed_stream_says_so_and_is_kept_as_failed(client, gpt, bench):
    bench.backend.script = lambda request: [
        *make_outputs(request, bench.tokenizer.ids("so far"))[:3],
        make_failure(request, ErrorCode.ENGINE_FAILED, "the replica is gone"),
    ]
    bench.backend.gate = asyncio.Semaphore(99)
    asked = {"model": "tiny", "input": "x", "stream": True}
    answer = await client.post("/v1/responses", json=asked)
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data")]
    error, failed = events[-2:]
    assert (error["type"], error["code"], error["message"]) == (
        "error", "replica_lost", "the replica is gone",
    )  # fmt: skip
    assert failed["type"] == "response.failed"
    assert failed["response"]["error"] == {
        "code": "server_error", "message": "the replica is gone", "type": "replica_lost",
    }  # fmt: skip
    kept = await gpt.retrieve(failed["response"]["id"])
    assert (kept.status, kept.output[0].status) == ("failed", "incomplete")


async def test_a_response_goes_on_in_the_background(gpt, bench):
    bench.backend.gate = asyncio.Semaphore(3)
    begun = await gpt.create(model="tiny", input="one", background=True)
    assert (begun.status, begun.background, begun.output) == ("in_progress", True, [])
    assert (await gpt.retrieve(begun.id)).to_dict() == begun.to_dict()
    for _ in range(99):
        bench.backend.gate.release()

    async def is_over():
        return (await gpt.retrieve(begun.id)).status != "in_progress"

    async with asyncio.timeout(60):
        while not await is_over():
            await asyncio.sleep(0.01)
    ended = await gpt.retrieve(begun.id)
    assert (ended.status, ended.output_text) == ("completed", ANSWER)
    assert ended.usage.output_tokens > 1
    follow = await gpt.create(model="tiny", input="two", previous_response_id=begun.id)
    assert follow.usage.input_tokens > ended.usage.input_tokens


async def test_a_response_in_the_background_is_stopped(gpt, bench, services):
    following = asyncio.create_task(services.responses.follow())
    bench.backend.gate = asyncio.Semaphore(3)
    begun = await gpt.create(model="tiny", input="one", background=True)
    await until(lambda: bench.backend.gate.locked())
    stopped = await gpt.cancel(begun.id)
    following.cancel()
    assert stopped.status == "cancelled"
    assert ANSWER.startswith(stopped.output_text)
    assert bench.backend.streams[0].is_aborted
    assert (await gpt.retrieve(begun.id)).to_dict() == stopped.to_dict()
    assert services.responses._held == set()


async def ended_in_background(gpt, **asked):
    begun = await gpt.create(model="tiny", background=True, **asked)
    async with asyncio.timeout(60):
        while (ended := await gpt.retrieve(begun.id)).status == "in_progress":
            await asyncio.sleep(0.01)
    return ended


async def test_what_fails_in_the_background_is_kept_as_failed(gpt, bench):
    bench.backend.script = lambda request: [
        make_failure(request, ErrorCode.ENGINE_FAILED, "the replica is gone")
    ]
    ended = await ended_in_background(gpt, input="one")
    assert (ended.status, ended.error.type) == ("failed", "replica_lost")


async def test_what_is_too_large_to_be_kept_fails_in_the_background(gpt, services):
    services.responses.max_response_bytes = 1200
    ended = await ended_in_background(gpt, input="x" * 300)
    assert (ended.status, ended.error.type, ended.output) == ("failed", "limit_exceeded", [])
    with pytest.raises(openai.BadRequestError) as raised:
        await gpt.create(
            model="tiny", background=True, input="x", metadata={"k": "v" * 500, "l": "v" * 500}
        )
    assert raised.value.code == "limit_exceeded"


async def test_an_ingress_that_leaves_ends_what_it_holds(gpt, bench, services, monkeypatch):
    monkeypatch.setattr("service.response_store.runs._FINISH_S", 0.05)
    bench.backend.gate = asyncio.Semaphore(3)
    begun = await gpt.create(model="tiny", input="one", background=True)
    await until(lambda: bench.backend.gate.locked())
    await services.responses.finish()
    assert bench.backend.streams[0].is_aborted
    assert (await gpt.retrieve(begun.id)).status == "cancelled"


class Unreachable:
    """Implements ResponseStore."""

    def __getattr__(self, name):
        async def call(*_):
            raise ApiError(ApiErrorCode.UNAVAILABLE, "stored responses cannot be reached now")

        return call


@pytest.mark.parametrize("store", [Unreachable()])
async def test_without_a_store_responses_are_made_and_lookups_fail_typed(client):
    asked = {"model": "tiny", "input": "x"}
    for more in ({}, {"stream": True}):
        answer = await client.post("/v1/responses", json={**asked, **more})
        assert answer.status_code == 200
        assert '"store":false' in answer.text
        assert '"completed"' in answer.text
    follow = {**asked, "previous_response_id": "resp_1"}
    alone = await client.post("/v1/responses", json={**asked, "background": True})
    assert (alone.status_code, alone.json()["error"]["code"]) == (503, "unavailable")
    for answer in (
        await client.post("/v1/responses", json=follow),
        await client.get("/v1/responses/resp_1"),
        await client.delete("/v1/responses/resp_1"),
    ):
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
        assert answer.headers["retry-after"]


@asynccontextmanager
async def streaming(app, asked, path="/v1/responses"):
    """A client that reads what comes, and leaves at the end."""
    client = AsgiClient(app, path, asked)
    running = asyncio.create_task(client.run())
    try:
        yield client
    finally:
        client.left.set()
        await asyncio.wait_for(running, 60)


async def until(condition):
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)
