"""OpenAI's Responses API: what the official client makes of answers and streams, and what goes to
the template and the engine."""

import json

import pytest
from pydantic import BaseModel

from tests.fakes.chats import PARAMETERS, Told, make_told_bench
from workers.builtin.tokenizer import CHAT_TEMPLATE
from workers.engine.protocol import FinishReason

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
WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "of <|im_end|>",
    "parameters": PARAMETERS,
    "strict": True,
}
NOW = {"type": "function", "name": "now", "parameters": None, "strict": False}
ASKED = {"model": "tiny", "input": "hi", "tools": [WEATHER, NOW], "max_output_tokens": 300}


@pytest.fixture
def told():
    return Told(CALLS)


@pytest.fixture
def template():
    return CHAT_TEMPLATE


@pytest.fixture
def bench(tmp_path, told, template):
    return make_told_bench(tmp_path, told, template)


@pytest.fixture
def gpt(openai_client):
    return openai_client.responses


async def post(client, **fields):
    return await client.post("/v1/responses", json={**ASKED, **fields})


async def events_of(client, **fields):
    response = await post(client, stream=True, **fields)
    assert response.headers["content-type"].startswith("text/event-stream"), response.text
    events = []
    for part in response.text.strip().split("\n\n"):
        name, data = part.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert events[-1]["type"] == name.removeprefix("event: ")
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def prompt_of(bench):
    return bench.tokenizer.encoder.decode(
        bench.backend.requests[-1].prompt_token_ids, skip_special_tokens=False
    )


async def test_a_response_has_messages_and_calls(gpt, bench):
    response = await gpt.create(**ASKED, metadata={"k": "v"}, instructions="be kind")
    assert response.id.startswith("resp_")
    assert (response.object, response.status, response.model) == ("response", "completed", "tiny")
    assert (response.error, response.incomplete_details) == (None, None)
    assert (response.instructions, response.metadata) == ("be kind", {"k": "v"})
    text, first, second = response.output
    assert (text.type, text.role, text.content[0].text) == ("message", "assistant", "Let me see.")
    assert (first.type, first.name, json.loads(first.arguments)) == (
        "function_call", "weather", {"city": "Köln"},
    )  # fmt: skip
    assert (second.name, json.loads(second.arguments), second.status) == ("now", {}, "completed")
    assert len({first.id, second.id, text.id, first.call_id, second.call_id}) == 5
    assert response.usage.output_tokens == len(bench.tokenizer.ids(CALLS)) + 1
    assert response.usage.input_tokens == len(bench.backend.requests[0].prompt_token_ids)
    assert response.usage.output_tokens_details.reasoning_tokens == 0
    assert response.tools[0].name == "weather"
    assert (response.tools[0].strict, response.tools[1].strict) == (True, False)
    assert response.max_output_tokens == 300
    assert "<|im_start|>system\nbe kind" in prompt_of(bench)


async def test_the_clients_own_accumulation_of_a_stream_gives_the_same(gpt):
    async with gpt.stream(**ASKED) as stream:
        kinds = [event.type async for event in stream]
        streamed = await stream.get_final_response()
    whole = await gpt.create(**ASKED)

    def shown(response):
        return [
            (item.type, getattr(item, "arguments", None), getattr(item, "content", None))
            for item in response.output
        ]

    assert shown(streamed)[0][2][0].text == shown(whole)[0][2][0].text
    assert shown(streamed)[1:] == shown(whole)[1:]
    assert (streamed.status, streamed.usage) == (whole.status, whole.usage)
    assert kinds.count("response.output_text.delta") > 1
    assert kinds.count("response.function_call_arguments.delta") > 5


async def test_events_come_in_their_order(client):
    events = await events_of(client)
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[:2] == ["created", "in_progress"]
    assert kinds[-1] == "completed"
    assert [kind for kind in kinds[2:-1] if not kind.endswith("delta")] == [
        "output_item.added", "content_part.added", "output_text.done", "content_part.done",
        "output_item.done",
        "output_item.added", "function_call_arguments.done", "output_item.done",
        "output_item.added", "function_call_arguments.done", "output_item.done",
    ]  # fmt: skip
    created, completed = events[0]["response"], events[-1]["response"]
    assert (created["status"], created["output"], created["usage"]) == ("in_progress", [], None)
    assert created["id"] == completed["id"]
    added = [e["item"] for e in events if e["type"] == "response.output_item.added"]
    done = [e["item"] for e in events if e["type"] == "response.output_item.done"]
    assert done == completed["output"]
    assert [item["id"] for item in added] == [item["id"] for item in done]
    assert {item["status"] for item in added} == {"in_progress"}
    assert (added[0]["content"], added[1]["arguments"]) == ([], "")
    for index, item in enumerate(done):
        pieces = [
            e["delta"] for e in events if e["type"].endswith("delta") and e["output_index"] == index
        ]
        text = item["content"][0]["text"] if index == 0 else item["arguments"]
        assert "".join(pieces) == text
        (over,) = [
            e
            for e in events
            if e["type"].endswith(("text.done", "arguments.done")) and e["item_id"] == item["id"]
        ]
        assert over.get("text", over.get("arguments")) == text


@pytest.mark.parametrize("template", [THINKING])
async def test_thinking_is_an_item_of_its_own_and_comes_back(gpt, client, bench, told):
    told.text = "why not\n</think>\n\nSo."
    response = await gpt.create(**ASKED, reasoning={"effort": "high", "summary": "auto"})
    thought, message = response.output
    assert (thought.type, thought.content[0].text, thought.summary) == ("reasoning", "why not", [])
    assert message.content[0].text == "So."
    num_thought = len(bench.tokenizer.ids("why not"))
    assert 0 <= response.usage.output_tokens_details.reasoning_tokens - num_thought <= 1
    events = await events_of(client)
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert [k for k in kinds if "reasoning" in k and "delta" not in k] == ["reasoning_text.done"]
    deltas = [e["delta"] for e in events if e["type"] == "response.reasoning_text.delta"]
    assert "".join(deltas) == "why not"
    before = [item.model_dump(exclude_none=True) for item in response.output]
    user = {"role": "user", "content": "again"}
    await gpt.create(**{**ASKED, "input": [user, *before, user]})
    assert "So.<|im_end|>\n<|im_start|>user\nagain" in prompt_of(bench)


async def test_the_template_sees_items_as_messages(client, bench):
    call = {"type": "function_call", "call_id": "c1", "name": "weather",
            "arguments": '{"city": "K <|im_end|>"}'}  # fmt: skip
    answer = {"type": "output_text", "text": "So.", "annotations": [], "logprobs": []}
    items = [
        {"role": "developer", "content": "be kind"},
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "message", "role": "assistant", "id": "m", "status": "completed",
         "content": [answer]},
        call,
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        {"type": "message", "role": "user", "content": "and?"},
    ]  # fmt: skip
    response = await post(client, input=items)
    assert response.status_code == 200, response.text
    prompt = prompt_of(bench)
    shown = {key: value for key, value in WEATHER.items() if key not in ("type", "strict")}
    assert json.dumps({"type": "function", "function": shown}, ensure_ascii=False) in prompt
    assert "<|im_start|>system\nbe kind" in prompt
    assert '{"name": "weather", "arguments": {"city": "K <|im_end|>"}}\n</tool_call>' in prompt
    assert "<|im_start|>tool\nrain<|im_end|>\n<|im_start|>user\nand?<|im_end|>" in prompt
    assert prompt.count("<|im_start|>assistant") == 2


async def test_a_cut_response_is_incomplete(gpt, told):
    told.text, told.finish = "so far", FinishReason.LENGTH
    response = await gpt.create(**ASKED)
    assert (response.status, response.incomplete_details.reason) == (
        "incomplete", "max_output_tokens",
    )  # fmt: skip
    assert (response.output[0].status, response.output_text) == ("incomplete", "so far")
    async with gpt.stream(**ASKED) as stream:
        last = [event async for event in stream][-1]
    assert (last.type, last.response.status) == ("response.incomplete", "incomplete")


async def test_an_answer_of_nothing_is_an_empty_message(gpt, told):
    told.text = ""
    response = await gpt.create(**ASKED)
    assert (len(response.output), response.output_text, response.status) == (1, "", "completed")


class Weather(BaseModel):
    city: str


async def test_a_pydantic_model_is_parsed_from_the_text(gpt, told, bench):
    told.text = '{"city": "Köln"}'
    response = await gpt.parse(model="tiny", input="hi", text_format=Weather)
    assert response.output_parsed == Weather(city="Köln")
    assert response.text.format.type == "json_schema"
    assert response.text.format.schema_["properties"]["city"]["type"] == "string"
    assert bench.backend.requests[-1].grammar


async def test_log_probabilities_are_of_the_text_alone(gpt, told, client, bench):
    told.text = CALLS
    asked = {**ASKED, "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    response = await gpt.create(**asked)
    text, *_ = response.output
    shown = "".join(entry.token for entry in text.content[0].logprobs)
    assert shown.startswith("Let me see.")
    assert "weather" not in shown
    assert len(text.content[0].logprobs[0].top_logprobs) == 2
    events = await events_of(client, include=asked["include"], top_logprobs=2)
    deltas = [e["logprobs"] for e in events if e["type"] == "response.output_text.delta"]
    (done,) = [e for e in events if e["type"] == "response.output_text.done"]
    assert sum(deltas, []) == done["logprobs"]
    assert done["logprobs"] == events[-1]["response"]["output"][0]["content"][0]["logprobs"]
    without = await gpt.create(**ASKED)
    assert without.output[0].content[0].logprobs == []


async def test_what_is_common_to_all_protocols_reaches_the_engine(gpt, bench):
    extra = {"seed": 3, "top_k": 4, "min_p": 0.25, "stop": ["zzz"], "repetition_penalty": 1.5}
    await gpt.create(**ASKED, temperature=0.5, top_p=0.75, extra_body=extra)
    sampling = bench.backend.requests[-1].sampling
    assert (sampling.seed, sampling.top_k, sampling.min_p) == (3, 4, 0.25)
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (0.5, 0.75, 300)
    assert sampling.repetition_penalty == 1.5
