"""Responses in the background as streams: their events, their numbers, where a client goes on."""

import asyncio
import json
from dataclasses import replace

import pytest

from service.api.openai.json_parts import MAX_CHARS
from service.api.responses.keeping import Keeping
from service.api.responses.replay import ReplayedStream
from service.limits import MAX_STORED_BYTES, Limits
from service.response_store.records import EndedResponse, ResponseName, State, StoredResponse
from service.security.callers import ANONYMOUS
from tests.fakes.backend import make_failure, make_outputs
from tests.fakes.chats import Told, make_told_bench
from tests.fakes.loop_probe import MAX_UNITS, held_units
from tests.fakes.text import ANSWER
from tests.unit.service.api.test_stored_responses import (
    WEATHER,
    ended_in_background,
    streaming,
    until,
)
from workers.builtin.tokenizer import CHAT_TEMPLATE
from workers.errors import ErrorCode

pytestmark = pytest.mark.asyncio


@pytest.fixture
def bench(tmp_path):
    return make_told_bench(tmp_path, Told(ANSWER), CHAT_TEMPLATE)


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
    last = 4 + len(ANSWER) - 1
    numbers = [0, 1, 2, 3, last, last + 1, last + 2, last + 3, last + 4]
    assert [event.sequence_number for event in events] == numbers
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
    for number in (0, 3, last, last + 3, last + 99):
        rest = [event for event in events if event.sequence_number > number]
        assert await replayed(gpt, ended.id, starting_after=number) == rest
    within = await replayed(gpt, ended.id, starting_after=4)
    assert (within[0].delta, within[1:]) == (ANSWER[1:], events[5:])


IN_THE_BACKGROUND = {"model": "tiny", "input": "one", "background": True, "stream": True}


def let_go(bench):
    for _ in range(999):
        bench.backend.gate.release()


async def later(client, response_id, after=-1):
    """What the store shows of it, as JSON."""
    query = f"stream=true&starting_after={after}" if after >= 0 else "stream=true"
    answer = await client.get(f"/v1/responses/{response_id}?{query}")
    return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data")]


def text_of(events):
    return "".join(event["delta"] for event in events if "delta" in event["type"])


def joined(events):
    """The same events where the deltas of an item are one, under the number of the last."""
    whole = []
    for event in events:
        if whole and whole[-1]["type"] == event["type"] and "delta" in event:
            event = {**event, "delta": whole.pop()["delta"] + event["delta"]}
        whole.append(event)
    return whole


async def test_a_response_in_the_background_is_streamed_as_it_grows(app, client, bench):
    bench.backend.gate = asyncio.Semaphore(3)
    async with streaming(app, IN_THE_BACKGROUND) as streamed:
        await until(lambda: text_of(streamed.events))
        assert text_of(streamed.events) != ANSWER
        assert streamed.events[0]["response"]["background"]
        num_events = len(streamed.events)
        for _ in range(4):
            bench.backend.gate.release()
        await until(lambda: len(streamed.events) > num_events)
        let_go(bench)
        await until(lambda: streamed.events[-1]["type"] == "response.completed")
    events = streamed.events
    assert len([event for event in events if "delta" in event]) > 2
    numbers = [event["sequence_number"] for event in events]
    assert numbers == sorted(set(numbers))
    stored = await later(client, events[0]["response"]["id"])
    assert joined(events) == stored
    for number in numbers:
        rest = await later(client, events[0]["response"]["id"], number)
        assert rest == joined([event for event in events if event["sequence_number"] > number])


async def test_who_comes_back_while_it_grows_gets_the_rest_as_it_grows(app, client, gpt, bench):
    bench.backend.gate = asyncio.Semaphore(3)
    async with streaming(app, IN_THE_BACKGROUND) as streamed:
        await until(lambda: text_of(streamed.events))
    seen = streamed.events
    response_id, number = seen[0]["response"]["id"], seen[-1]["sequence_number"]
    assert not bench.backend.streams[0].is_aborted
    assert (await gpt.retrieve(response_id)).status == "in_progress"
    path = f"/v1/responses/{response_id}?stream=true&starting_after={number}"
    async with streaming(app, None, path) as resumed:
        for _ in range(4):
            bench.backend.gate.release()
        await until(lambda: text_of(resumed.events))
        assert text_of(seen + resumed.events) != ANSWER
        let_go(bench)
        await until(lambda: resumed.events and "response" in resumed.events[-1])
    assert text_of(seen + resumed.events) == ANSWER
    assert joined(seen + resumed.events) == await later(client, response_id)


EOS_TOKEN_ID = 2
CALLS = (
    'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'
)


@pytest.mark.parametrize(("told", "num_items"), [("", 1), ("a", 1), (CALLS, 3)])
async def test_what_comes_at_once_is_one_stream_now_and_later(client, bench, told, num_items):
    """An empty message has no delta."""
    token_ids = [*bench.tokenizer.ids(told), EOS_TOKEN_ID]
    bench.backend.script = lambda request: make_outputs(request, token_ids)
    asked = {**IN_THE_BACKGROUND, "tools": [WEATHER], "tool_choice": "auto"}
    answer = await client.post("/models/tiny/v1/responses", json=asked)
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data")]
    assert events[-1]["type"] == "response.completed"
    assert len(events[-1]["response"]["output"]) == num_items
    stored = await later(client, events[0]["response"]["id"])
    assert joined(events) == stored
    for number in range(stored[-1]["sequence_number"]):
        rest = await later(client, events[0]["response"]["id"], number)
        assert rest[-1] == stored[-1]
        assert rest[0]["sequence_number"] > number


async def test_a_failure_in_the_background_is_streamed_and_told_again(client, bench):
    bench.backend.script = lambda request: [
        *make_outputs(request, bench.tokenizer.ids("so far"))[:3],
        make_failure(request, ErrorCode.ENGINE_FAILED, "the replica is gone"),
    ]
    bench.backend.gate = asyncio.Semaphore(999)
    answer = await client.post("/v1/responses", json=IN_THE_BACKGROUND)
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data")]
    assert [event["type"] for event in events[-2:]] == ["error", "response.failed"]
    response_id = events[0]["response"]["id"]
    again = await later(client, response_id, events[-1]["sequence_number"])
    assert [event["type"] for event in again] == ["error", "response.failed"]
    assert again[1]["response"] == events[-1]["response"]


async def test_what_is_too_large_to_be_kept_is_streamed_as_failed(client, services):
    services.responses.max_response_bytes = 1200
    asked = {**IN_THE_BACKGROUND, "input": "x" * 300}
    answer = await client.post("/v1/responses", json=asked)
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data")]
    assert text_of(events) == ANSWER
    error, failed = events[-2:]
    assert (error["code"], failed["type"]) == ("limit_exceeded", "response.failed")
    again = await later(client, events[0]["response"]["id"], events[-3]["sequence_number"])
    assert [event["type"] for event in again] == ["error", "response.failed"]


async def test_a_stream_ends_where_its_response_could_not_be_ended(client, bench, monkeypatch):
    async def cannot(keeping, ending):
        raise RuntimeError("no end")

    bench.backend.gate = asyncio.Semaphore(999)
    monkeypatch.setattr(Keeping, "end", cannot)
    answer = await client.post("/v1/responses", json=IN_THE_BACKGROUND)
    last = json.loads(answer.text.splitlines()[-2][6:])
    assert (last["type"], last["code"]) == ("error", "internal")
    assert last["sequence_number"] > 2


async def test_another_ingress_streams_the_rest_when_it_has_ended(gpt, client, store, bench):
    """It knows what the store has."""
    bench.backend.gate = asyncio.Semaphore(3)
    begun = await gpt.create(model="tiny", input="one", background=True)
    streaming_it = asyncio.create_task(elsewhere(store, begun.id))
    await until(bench.backend.gate.locked)
    assert not streaming_it.done()
    let_go(bench)
    async with asyncio.timeout(60):
        events = await streaming_it
    assert [event["response"] for event in events[:2]] == [begun.to_dict()] * 2
    assert events == await later(client, begun.id)


async def test_who_leaves_the_stream_of_a_response_stops_nothing(gpt, app, bench):
    bench.backend.gate = asyncio.Semaphore(3)
    begun = await gpt.create(model="tiny", input="one", background=True)
    async with streaming(app, None, f"/v1/responses/{begun.id}?stream=true") as streamed:
        await until(lambda: len(streamed.events) >= 2)
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


async def elsewhere(store, response_id, after=-1):
    """What an ingress streams that does not make the response itself."""
    name = ResponseName(ANONYMOUS.tenant, response_id)
    begun = await store.get(name)
    pieces = ReplayedStream(store, name, begun, after).events()
    lines = b"".join([piece async for piece in pieces]).decode().splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data")]


async def test_that_a_response_was_lost_is_told_after_whatever_number(gpt, store, bench):
    bench.backend.gate = asyncio.Semaphore(0)
    lost = await gpt.create(model="tiny", input="one", background=True)
    store._shelf._runners.clear()
    events = await elsewhere(store, lost.id, after=50)
    assert [(event["type"], event["sequence_number"]) for event in events] == [
        ("error", 51),
        ("response.failed", 52),
    ]
    assert events[0]["code"] == "replica_lost"


async def test_how_a_response_failed_is_streamed_later_too(gpt, bench):
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


async def test_a_response_that_is_deleted_meanwhile_ends_its_stream(gpt, store, bench):
    bench.backend.gate = asyncio.Semaphore(3)
    begun = await gpt.create(model="tiny", input="one", background=True)
    name = ResponseName(ANONYMOUS.tenant, begun.id)
    stream = ReplayedStream(store, name, await store.get(name), after=9)
    await store.delete(name)
    async with asyncio.timeout(60):
        whole = b"".join([piece async for piece in stream.events()])
    event = json.loads(whole.split(b"data: ", 1)[1])
    assert (event["type"], event["code"]) == ("error", "response_not_found")


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


async def stored_answer(gpt, store, text):
    """(its name, a response that has ended with this text)."""
    begun = await gpt.create(model="tiny", input="one", background=True)
    name = ResponseName(ANONYMOUS.tenant, begun.id)
    stored = await store.get(name)
    item = {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant"}
    content = [{"type": "output_text", "text": text, "logprobs": [], "annotations": []}]
    output = json.dumps([item | {"content": content}]).encode()
    ended = StoredResponse(State.ENDED, "tiny", stored.head, b"[]", output)
    return name, replace(ended, head=stored.head.replace(b"in_progress", b"completed"))


@pytest.mark.parametrize("num_seen", [0, 1, MAX_CHARS - 1, MAX_CHARS, MAX_CHARS + 40_000])
async def test_a_text_of_several_pieces_is_streamed_from_wherever_it_was_left(gpt, store, num_seen):
    text = 'é🙂\n"a' * (MAX_CHARS // 4)
    name, ended = await stored_answer(gpt, store, text)
    stream = ReplayedStream(store, name, ended, 3 + num_seen)
    written = b"".join([piece async for piece in stream.events()])
    events = [
        json.loads(event.partition("data: ")[2]) for event in written.decode().split("\n\n")[:-1]
    ]
    assert (events[0]["delta"], events[1]["text"]) == (text[num_seen:], text)
    assert [event["sequence_number"] - len(text) for event in events] == [3, 4, 5, 6, 7]


async def test_the_largest_stored_response_is_streamed_without_holding_the_loop(gpt, store):
    text = "ab\n" * (Limits().max_stored_response_bytes // 4)
    name, ended = await stored_answer(gpt, store, text)

    async def streamed():
        stream = ReplayedStream(store, name, ended, -1)
        return sum([len(piece) async for piece in stream.events()])

    num_bytes, held = await held_units(streamed)
    assert num_bytes > 5 * len(ended.output)
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
