"""Responses in the background as streams: their events, their numbers, where a client goes on."""

import asyncio
import json
from dataclasses import replace

import pytest

from service.api.responses.replay import ReplayedStream
from service.limits import MAX_STORED_BYTES, Limits
from service.response_store.records import EndedResponse, ResponseName, State, StoredResponse
from service.security.callers import ANONYMOUS
from tests.fakes.backend import make_failure
from tests.fakes.loop_probe import MAX_UNITS, held_units
from tests.fakes.text import ANSWER
from tests.unit.service.api.test_stored_responses import ended_in_background, streaming, until
from workers.errors import ErrorCode

pytestmark = pytest.mark.asyncio


@pytest.fixture
def gpt(openai_client):
    return openai_client.responses


@pytest.fixture
def store(services):
    return services.responses.store


async def replayed(gpt, response_id, **more):
    return [event async for event in await gpt.retrieve(response_id, stream=True, **more)]


def kinds(events):
    return [event.type.removeprefix("response.") for event in events]


OF_A_TEXT = [
    "output_item.added",
    "content_part.added",
    "output_text.delta",
    "output_text.done",
    "content_part.done",
    "output_item.done",
]


async def test_a_response_in_the_background_is_streamed_as_often_as_one_likes(gpt):
    ended = await ended_in_background(
        gpt, input="one", include=["message.output_text.logprobs"], instructions="be kind"
    )
    events = await replayed(gpt, ended.id)
    assert kinds(events) == ["created", "in_progress", *OF_A_TEXT, "completed"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    begun = events[0].response
    assert (begun.status, begun.output, begun.usage, begun.instructions) == (
        "in_progress",
        [],
        None,
        "be kind",
    )
    assert events[2].item.content == []
    assert (events[2].item.status, events[4].delta) == ("in_progress", ANSWER)
    assert (events[5].text, len(events[5].logprobs)) == (ANSWER, ended.usage.output_tokens)
    assert events[7].item == ended.output[0]
    assert events[-1].response == ended
    for number in (0, 4, len(events) - 2, 99):
        assert await replayed(gpt, ended.id, starting_after=number) == events[number + 1 :]


async def test_the_stream_of_a_response_under_way_goes_on_when_it_has_ended(
    gpt, app, client, bench
):
    bench.backend.gate = asyncio.Semaphore(3)
    begun = await gpt.create(model="tiny", input="one", background=True)
    path = f"/v1/responses/{begun.id}?stream=true"
    async with streaming(app, None, path) as streamed:
        await until(lambda: len(streamed.events) == 2)
        await asyncio.sleep(0.2)
        assert [event["response"] for event in streamed.events] == [begun.to_dict()] * 2
        for _ in range(99):
            bench.backend.gate.release()
        await until(lambda: streamed.events[-1]["type"] == "response.completed")
    assert streamed.events == [
        json.loads(line[6:])
        for line in (await client.get(path)).text.splitlines()
        if line.startswith("data")
    ]


async def test_who_leaves_the_stream_of_a_response_stops_nothing(gpt, app, bench):
    bench.backend.gate = asyncio.Semaphore(3)
    begun = await gpt.create(model="tiny", input="one", background=True)
    async with streaming(app, None, f"/v1/responses/{begun.id}?stream=true") as streamed:
        await until(lambda: len(streamed.events) == 2)
    assert not bench.backend.streams[0].is_aborted
    assert (await gpt.retrieve(begun.id)).status == "in_progress"


async def test_calls_and_thinking_are_streamed_later_too(gpt, store):
    name = ResponseName(ANONYMOUS.tenant, "resp_1")
    begun = await gpt.create(model="tiny", input="one", background=True)
    stored = await store.get(ResponseName(ANONYMOUS.tenant, begun.id))
    head = json.loads(stored.head) | {"id": "resp_1", "status": "completed"}
    output = [
        {"type": "reasoning", "id": "rs_1", "status": "completed", "summary": [],
         "content": [{"type": "reasoning_text", "text": "hm"}], "encrypted_content": None},
        {"type": "function_call", "id": "fc_1", "status": "completed", "call_id": "call_1",
         "name": "now", "arguments": "{}"},
    ]  # fmt: skip
    parts = (json.dumps(part).encode() for part in (head, [], output))
    await store.end(EndedResponse(name, "tiny", *parts))
    events = await replayed(gpt, "resp_1")
    assert kinds(events)[2:-1] == [
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done",
        "content_part.done", "output_item.done", "output_item.added",
        "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
    ]  # fmt: skip
    assert (events[4].delta, events[9].delta) == ("hm", "{}")
    assert (events[8].item.name, events[8].item.arguments) == ("now", "")
    assert [item.to_dict() for item in events[-1].response.output] == output


@pytest.mark.parametrize("is_lost", [False, True])
async def test_how_a_response_failed_is_streamed_later_too(gpt, store, bench, is_lost):
    if is_lost:
        bench.backend.gate = asyncio.Semaphore(0)
        failed = await gpt.create(model="tiny", input="one", background=True)
        store._shelf._runners.clear()
    else:
        bench.backend.script = lambda request: [
            make_failure(request, ErrorCode.ENGINE_FAILED, "the replica is gone")
        ]
        failed = await ended_in_background(gpt, input="one")
    events = await replayed(gpt, failed.id)
    assert kinds(events) == ["created", "in_progress", "error", "failed"]
    assert (events[2].code, events[2].message) == (
        "replica_lost",
        events[3].response.error.message,
    )
    assert events[0].response.error is None
    assert events[3].response == await gpt.retrieve(failed.id)


async def test_a_response_that_is_deleted_meanwhile_ends_its_stream(gpt, app, store, bench):
    bench.backend.gate = asyncio.Semaphore(3)
    begun = await gpt.create(model="tiny", input="one", background=True)
    async with streaming(app, None, f"/v1/responses/{begun.id}?stream=true") as streamed:
        await until(lambda: len(streamed.events) == 2)
        await store.delete(ResponseName(ANONYMOUS.tenant, begun.id))
        await until(lambda: len(streamed.events) == 3)
    assert (streamed.events[2]["type"], streamed.events[2]["code"]) == (
        "error",
        "response_not_found",
    )


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("stream=perhaps", "stream"),
        ("starting_after=1", "starting_after"),
        ("stream=true&starting_after=-1", "starting_after"),
        ("stream=true&starting_after=x", "starting_after"),
        ("stream=true&include_obfuscation=true", "include_obfuscation"),
        ("stream=true", "response_id"),
    ],
)
async def test_what_cannot_be_streamed_later_is_refused(gpt, client, query, param):
    created = await gpt.create(model="tiny", input="one")
    answer = await client.get(f"/v1/responses/{created.id}?{query}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_the_largest_stored_response_is_streamed_without_holding_the_loop(gpt, store):
    begun = await gpt.create(model="tiny", input="one", background=True)
    stored = await store.get(ResponseName(ANONYMOUS.tenant, begun.id))
    text = "ab\n" * (Limits().max_stored_response_bytes // 4)
    item = {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant"}
    content = [{"type": "output_text", "text": text, "logprobs": [], "annotations": []}]
    output = json.dumps([item | {"content": content}]).encode()
    ended = StoredResponse(State.ENDED, "tiny", stored.head, b"[]", output)
    ended = replace(ended, head=stored.head.replace(b"in_progress", b"completed"))
    name = ResponseName(ANONYMOUS.tenant, begun.id)

    async def streamed():
        stream = ReplayedStream(store, name, ended, -1)
        return sum([len(piece) async for piece in stream.events()])

    num_bytes, held = await held_units(streamed)
    assert num_bytes > 5 * len(output)
    assert held < MAX_UNITS


async def test_long_instructions_of_a_stored_response_hold_no_loop(gpt, store):
    begun = await gpt.create(model="tiny", input="one", instructions="be kind", background=True)
    name = ResponseName(ANONYMOUS.tenant, begun.id)
    stored = await store.get(name)
    long = json.dumps("be kind\n" * (MAX_STORED_BYTES // 9)).encode()
    head = stored.head.replace(b'"be kind"', long).replace(b"in_progress", b"completed")
    ended = StoredResponse(State.ENDED, "tiny", head, b"[]", b"[]")

    async def streamed():
        return [piece async for piece in ReplayedStream(store, name, ended, -1).events()]

    pieces, held = await held_units(streamed)
    assert b"".join(pieces).count(long) == 3
    assert held < MAX_UNITS
