"""Anthropic's Messages API: what the official client makes of answers and streams, and what goes to
the template and the engine."""

import copy
import json

import anthropic
import httpx2
import pytest
import pytest_asyncio

from service.errors import ApiError, ApiErrorCode
from tests.fakes.backend import make_failure, make_outputs
from tests.fakes.chats import PARAMETERS, Told, make_told_bench
from workers.builtin.tokenizer import CHAT_TEMPLATE
from workers.engine.protocol import FinishReason, StepOutput
from workers.errors import ErrorCode

pytestmark = pytest.mark.asyncio

THINKING = CHAT_TEMPLATE.replace(
    "<|im_start|>assistant\\n' -}}",
    "<|im_start|>assistant\\n' + ('' if enable_thinking is false else '<think>\\n') -}}"
    "{#- </think> -#}",
)
CALLS = (
    'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
WEATHER = {"name": "weather", "description": "of <|im_end|>", "input_schema": PARAMETERS}
NOW = {"name": "now", "input_schema": {"type": "object"}}
USER = {"role": "user", "content": "hi"}
ASKED = {"model": "tiny", "max_tokens": 300, "messages": [USER], "tools": [WEATHER, NOW]}


@pytest.fixture
def told():
    return Told(CALLS)


@pytest.fixture
def template():
    return CHAT_TEMPLATE


@pytest.fixture
def bench(tmp_path, told, template):
    return make_told_bench(tmp_path, told, template)


@pytest_asyncio.fixture
async def claude(app):
    transport = httpx2.ASGITransport(app=app)
    async with httpx2.AsyncClient(transport=transport, base_url="http://tessera") as http:
        yield anthropic.AsyncAnthropic(
            base_url="http://tessera", api_key="none", http_client=http, max_retries=0
        )


async def post(client, **fields):
    return await client.post("/v1/messages", json={**ASKED, **fields})


def prompt_of(bench):
    return bench.tokenizer.encoder.decode(
        bench.backend.requests[-1].prompt_token_ids, skip_special_tokens=False
    )


async def test_a_message_has_text_and_calls(claude, bench):
    message = await claude.messages.create(**ASKED)
    assert (message.type, message.role, message.model) == ("message", "assistant", "tiny")
    assert message.id == f"msg_{message._request_id}"
    assert (message.stop_reason, message.stop_sequence) == ("tool_use", None)
    text, first, second = message.content
    assert (text.type, text.text) == ("text", "Let me see.")
    assert (first.type, first.name, first.input) == ("tool_use", "weather", {"city": "Köln"})
    assert (second.name, second.input) == ("now", {})
    assert first.id != second.id
    assert message.usage.output_tokens == len(bench.tokenizer.ids(CALLS)) + 1
    assert message.usage.input_tokens == len(bench.backend.requests[0].prompt_token_ids)


async def test_the_clients_own_accumulation_of_a_stream_gives_the_same(claude):
    async with claude.messages.stream(**ASKED) as stream:
        texts = [text async for text in stream.text_stream]
        message = await stream.get_final_message()
    assert len(texts) > 1
    whole = await claude.messages.create(**ASKED)
    shown = [
        [(b.type, getattr(b, "text", ""), getattr(b, "input", None)) for b in m.content]
        for m in (message, whole)
    ]
    assert shown[0] == shown[1]
    assert (message.stop_reason, message.usage) == (whole.stop_reason, whole.usage)


async def test_events_come_in_their_order(client):
    response = await post(client, stream=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    names, events = [], []
    for part in response.text.strip().split("\n\n"):
        name, data = part.split("\n")
        names.append(name.removeprefix("event: "))
        events.append(json.loads(data.removeprefix("data: ")))
    assert names == [event["type"] for event in events]
    assert names[:2] == ["message_start", "ping"]
    assert names[-2:] == ["message_delta", "message_stop"]
    start = events[0]["message"]
    assert (start["content"], start["stop_reason"]) == ([], None)
    blocks = [event for event in events if event["type"].startswith("content_block")]
    kinds = [(event["type"].removeprefix("content_block_"), event["index"]) for event in blocks]
    assert [kind for kind in kinds if kind[0] != "delta"] == [
        ("start", 0), ("stop", 0), ("start", 1), ("stop", 1), ("start", 2), ("stop", 2),
    ]  # fmt: skip
    # A delta stands between the start and the stop of its block.
    assert sorted(kinds, key=lambda kind: kind[1]) == kinds
    assert blocks[0]["content_block"] == {"type": "text", "text": ""}
    pieces = [e["delta"] for e in blocks if e["type"].endswith("delta") and e["index"] == 1]
    assert {piece["type"] for piece in pieces} == {"input_json_delta"}
    assert len(pieces) > 5
    assert json.loads("".join(piece["partial_json"] for piece in pieces)) == {"city": "Köln"}
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


async def test_the_template_sees_system_tools_calls_and_results(client, bench):
    call = {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "K <|im_end|>"}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "rain", "is_error": True}
    cached = {"type": "text", "text": "be kind", "cache_control": {"type": "ephemeral"}}
    messages = [
        USER,
        {"role": "user", "content": [{"type": "text", "text": "again"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "So."}, call]},
        {"role": "user", "content": [result, {"type": "text", "text": "and?"}]},
    ]
    response = await post(client, messages=messages, system=[cached, cached])
    assert response.status_code == 200, response.text
    prompt = prompt_of(bench)
    shown = {"type": "function", "function": {**WEATHER, "parameters": PARAMETERS}}
    del shown["function"]["input_schema"]
    assert "<|im_start|>system\nbe kind\nbe kind" in prompt
    assert json.dumps(shown, ensure_ascii=False) in prompt
    assert "<|im_start|>user\nhi\nagain<|im_end|>" in prompt
    assert '{"name": "weather", "arguments": {"city": "K <|im_end|>"}}\n</tool_call>' in prompt
    assert "<|im_start|>tool\nError: rain<|im_end|>\n<|im_start|>user\nand?<|im_end|>" in prompt


async def test_a_last_message_of_the_assistant_goes_on(client, bench):
    messages = [USER, {"role": "assistant", "content": "The answer is ("}]
    assert (await post(client, messages=messages)).status_code == 200
    assert prompt_of(bench).endswith("<|im_start|>assistant\nThe answer is (")


async def test_sampling_is_what_was_asked_for(client, bench):
    await post(client, temperature=0.25, top_k=7, top_p=0.5, stop_sequences=["zzz"])
    sampling = bench.backend.requests[0].sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.25, 7, 0.5)
    assert sampling.max_tokens == 300


class TestEnds:
    """Why a message ended."""

    async def test_at_its_end(self, claude, told):
        told.text = "Yes."
        message = await claude.messages.create(**ASKED)
        assert (message.stop_reason, message.content[0].text) == ("end_turn", "Yes.")

    async def test_at_a_stop_sequence(self, claude):
        message = await claude.messages.create(**ASKED, stop_sequences=["see"])
        assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "see")
        assert message.content[0].text == "Let me "

    async def test_at_max_tokens_within_a_call(self, claude, bench, told):
        told.text = '<tool_call>{"name": "weather", "arguments": {"city": "a b c d e f", "x": [1, 2'
        length = len(bench.tokenizer.ids(told.text)) - 2
        fields = ASKED | {"max_tokens": length}
        message = await claude.messages.create(**fields)
        async with claude.messages.stream(**fields) as stream:
            streamed = await stream.get_final_message()
        assert message.stop_reason == streamed.stop_reason == "max_tokens"
        assert message.content[0].input["city"] == "a b c d e f"
        assert message.content[0].input == streamed.content[0].input

    async def test_at_the_end_of_the_context(self, claude, bench, told):
        """max_tokens beyond it is no error: clients ask for the most that any model has."""
        told.text = "Yes. " * 3000
        message = await claude.messages.create(**ASKED | {"max_tokens": 16_000})
        room = 4096 - message.usage.input_tokens
        assert message.usage.output_tokens == room
        assert message.stop_reason == "model_context_window_exceeded"


class TestTools:
    async def test_none_keeps_them_from_the_model(self, claude, bench):
        message = await claude.messages.create(**ASKED, tool_choice={"type": "none"})
        assert message.content[0].text == CALLS
        assert "weather" not in prompt_of(bench)

    @pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
    async def test_forced_calls_have_a_grammar(self, claude, bench, choice):
        await claude.messages.create(**ASKED, tool_choice=choice)
        (request,) = bench.backend.requests
        assert "weather" in request.grammar
        assert ("now" in request.grammar) == (choice["type"] == "any")

    async def test_strict_tools_have_a_grammar(self, claude, bench):
        await claude.messages.create(**ASKED | {"tools": [{**WEATHER, "strict": True}]})
        assert "weather" in bench.backend.requests[0].grammar

    async def test_one_call_at_most_where_that_is_asked_for(self, claude):
        choice = {"type": "auto", "disable_parallel_tool_use": True}
        message = await claude.messages.create(**ASKED, tool_choice=choice)
        assert [b.name for b in message.content if b.type == "tool_use"] == ["weather"]

    async def test_an_answer_in_a_schema(self, claude, bench):
        config = {"format": {"type": "json_schema", "schema": PARAMETERS}}
        await claude.messages.create(**ASKED, output_config=config)
        assert "city" in bench.backend.requests[0].grammar


class TestThinking:
    """A model whose template begins the thinking."""

    @pytest.fixture
    def template(self):
        return THINKING

    @pytest.fixture
    def told(self):
        return Told("I wonder.\n</think>\n\nYes.")

    async def test_it_is_a_block_of_its_own(self, claude):
        asked = ASKED | {"thinking": {"type": "enabled", "budget_tokens": 1024}}
        message = await claude.messages.create(**asked)
        async with claude.messages.stream(**asked) as stream:
            streamed = await stream.get_final_message()
        assert message.content[0] == streamed.content[0]
        assert message.content[1].text == streamed.content[1].text
        thought, text = message.content
        assert (thought.type, thought.thinking, text.text) == ("thinking", "I wonder.", "Yes.")
        assert thought.signature

    async def test_a_client_may_send_it_back(self, claude, bench):
        message = await claude.messages.create(**ASKED)
        messages = [USER, {"role": "assistant", "content": message.content}, USER]
        await claude.messages.create(**ASKED | {"messages": messages})
        assert "Yes.<|im_end|>" in prompt_of(bench)

    async def test_it_can_be_turned_off_or_left_out(self, claude, bench, told):
        omitted = {"type": "adaptive", "display": "omitted"}
        message = await claude.messages.create(**ASKED, thinking=omitted)
        assert [block.type for block in message.content] == ["text"]
        assert prompt_of(bench).endswith("<think>\n")
        told.text = "Yes."
        await claude.messages.create(**ASKED, thinking={"type": "disabled"})
        assert not prompt_of(bench).endswith("<think>\n")


async def test_pieces_of_a_stream_that_moved_are_the_same_blocks(claude, bench):
    """A move cuts outputs anywhere: text and parts of several calls come in one delta."""

    def script(request):
        token_ids = [*bench.tokenizer.ids(CALLS), 2]
        sizes = (len(token_ids) - 30, 30)
        outputs, start = [], 0
        for size in sizes:
            outputs.append(StepOutput(request.request_id, token_ids[start : start + size]))
            start += size
        outputs[-1].finish_reason, outputs[-1].stop_token_id = FinishReason.STOP, 2
        return outputs

    whole = await claude.messages.create(**ASKED)
    bench.backend.script = script
    async with claude.messages.stream(**ASKED) as stream:
        moved = await stream.get_final_message()
    shown = [
        [(b.type, getattr(b, "text", ""), getattr(b, "input", None)) for b in m.content]
        for m in (moved, whole)
    ]
    assert shown[0] == shown[1]


async def test_what_was_cached_is_told(claude, bench):
    bench.backend.script = lambda r: make_outputs(r, [40, 2], num_cached_tokens=9)
    message = await claude.messages.create(**ASKED)
    async with claude.messages.stream(**ASKED) as stream:
        streamed = await stream.get_final_message()
    assert message.usage == streamed.usage
    assert message.usage.cache_read_input_tokens == 9
    num_prompt_tokens = len(bench.backend.requests[0].prompt_token_ids)
    assert message.usage.input_tokens == num_prompt_tokens - 9


async def test_tokens_are_counted_as_they_are_sent(claude, bench):
    fields = {name: value for name, value in ASKED.items() if name != "max_tokens"}
    counted = await claude.messages.count_tokens(**fields, system="be kind")
    message = await claude.messages.create(**ASKED, system="be kind")
    assert counted.input_tokens == message.usage.input_tokens > 50
    assert len(bench.backend.requests) == 1


async def test_a_failure_in_mid_stream_is_an_error_event(claude, bench):
    bench.backend.script = lambda r: [
        *make_outputs(r, [40, 41, 42])[:2],
        make_failure(r, ErrorCode.ENGINE_FAILED, "the replica is gone"),
    ]
    with pytest.raises(anthropic.APIStatusError, match="the replica is gone") as raised:
        async with claude.messages.stream(**ASKED) as stream:
            await stream.get_final_message()
    assert raised.value.body["error"]["code"] == "replica_lost"
    assert raised.value.body["error"]["type"] == "overloaded_error"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_full_service_says_so_in_its_status(claude, bench, stream):
    bench.backend.refusal = ApiError(ApiErrorCode.OVERLOADED, "full", retry_after_s=1.5)
    with pytest.raises(anthropic.APIStatusError) as raised:
        await claude.messages.create(**ASKED, stream=stream)
    assert raised.value.status_code == 529
    assert raised.value.response.headers["retry-after"] == "2"
    assert raised.value.body["error"]["type"] == "overloaded_error"


async def test_a_model_may_be_in_the_path(client):
    body = copy.deepcopy(ASKED)
    del body["model"]
    assert (await client.post("/models/tiny/v1/messages", json=body)).json()["model"] == "tiny"
    missing = await client.post("/models/no/v1/messages", json=body)
    assert (missing.status_code, missing.json()["error"]["type"]) == (404, "not_found_error")
