"""Chats with tools and thinking over HTTP: what goes to the template and the engine, what the
official client makes of the answer, and every refusal by its name."""

import copy
import json

import jsonschema
import pytest

from tests.fakes.chats import ASKED, PARAMETERS, TOOL, Told, call_of, make_told_bench
from workers.builtin.tokenizer import CHAT_TEMPLATE
from workers.engine.protocol import FinishReason, StepOutput

pytestmark = pytest.mark.asyncio

THINKING = CHAT_TEMPLATE.replace(
    "<|im_start|>assistant\\n' -}}",
    "<|im_start|>assistant\\n' + ('' if enable_thinking is false else '<think>\\n') -}}"
    "{#- </think> -#}",
)
NAMED = {"type": "function", "function": {"name": "weather"}}
CALLS = (
    'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)


@pytest.fixture
def told():
    return Told(CALLS)


@pytest.fixture
def template():
    return CHAT_TEMPLATE


@pytest.fixture
def bench(tmp_path, told, template):
    return make_told_bench(tmp_path, told, template)


def prompt_of(bench):
    (request,) = bench.backend.requests
    return bench.tokenizer.encoder.decode(request.prompt_token_ids, skip_special_tokens=False)


async def test_calls_and_content_come_apart(openai_client):
    answer = await openai_client.chat.completions.create(**ASKED)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see."
    found = [(c.type, c.function.name, c.function.arguments) for c in choice.message.tool_calls]
    assert found == [("function", "weather", '{"city": "Köln"}'), ("function", "now", "{}")]
    ids = {call.id for call in choice.message.tool_calls}
    assert len(ids) == 2
    assert all(call_id.startswith("call_") for call_id in ids)


@pytest.mark.parametrize("n", [1, 3])
async def test_the_clients_own_accumulation_of_a_stream_gives_the_same(openai_client, n):
    async with openai_client.chat.completions.stream(**ASKED, n=n) as stream:
        async for _ in stream:
            pass
        answer = await stream.get_final_completion()
    whole = await openai_client.chat.completions.create(**ASKED, n=n)
    assert len(answer.choices) == n
    for choice, other in zip(answer.choices, whole.choices, strict=True):
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "Let me see."
        calls = [
            [(c.function.name, c.function.arguments) for c in message.tool_calls]
            for message in (choice.message, other.message)
        ]
        assert calls[0] == calls[1] == [("weather", '{"city": "Köln"}'), ("now", "{}")]


async def test_chunks_name_a_call_once_and_then_bring_its_arguments(openai_client):
    stream = await openai_client.chat.completions.create(**ASKED, stream=True)
    deltas = [chunk.choices[0].delta async for chunk in stream]
    calls = [call for delta in deltas for call in delta.tool_calls or ()]
    named = [(c.index, c.type, c.function.name) for c in calls if c.id]
    assert named == [(0, "function", "weather"), (1, "function", "now")]
    rest = [call for call in calls if not call.id]
    assert all((call.type, call.function.name) == (None, None) for call in rest)
    assert sum(call.index == 0 for call in rest) > 5
    joined = "".join(c.function.arguments for c in calls if c.index == 0)
    assert joined == '{"city": "Köln"}'


async def test_usage_counts_what_the_model_wrote(openai_client, bench):
    answer = await openai_client.chat.completions.create(**ASKED)
    assert answer.usage.completion_tokens == len(bench.tokenizer.ids(CALLS)) + 1


@pytest.mark.parametrize(
    "text", ["<tool_call>broken", '<tool_call>{"name": "x", "arguments": {}}', "No.\n", "{"]
)
async def test_what_only_looks_like_a_call_is_content(openai_client, told, text):
    told.text = text
    answer = await openai_client.chat.completions.create(**ASKED)
    assert answer.choices[0].message.content == text
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].finish_reason == "stop"


async def test_a_call_that_max_tokens_cuts_ends_with_length(openai_client, bench, told):
    told.text = '<tool_call>{"name": "weather", "arguments": {"city": "a b c d e f g h i j k l"'
    length = len(bench.tokenizer.ids(told.text)) - 4
    answer = await openai_client.chat.completions.create(**ASKED | {"max_tokens": length})
    (choice,) = answer.choices
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls[0].function.arguments.startswith('{"city": "a b')


@pytest.mark.parametrize("stop", ["ln", '"}}'])
async def test_a_call_that_a_stop_string_cuts_is_none_to_be_made(openai_client, stop):
    answer = await openai_client.chat.completions.create(**ASKED, stop=[stop])
    (choice,) = answer.choices
    assert choice.finish_reason == "stop"
    assert '{"city": "Kö' in choice.message.tool_calls[0].function.arguments


async def test_a_stop_string_behind_a_call_leaves_it_whole(openai_client):
    answer = await openai_client.chat.completions.create(**ASKED, stop=["</tool_call>"])
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls[0].function.arguments == '{"city": "Köln"}'


async def test_one_call_at_most_where_that_is_asked_for(openai_client):
    answer = await openai_client.chat.completions.create(**ASKED, parallel_tool_calls=False)
    assert [call.function.name for call in answer.choices[0].message.tool_calls] == ["weather"]


async def test_the_template_sees_tools_calls_and_results(client, bench):
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    call["function"]["arguments"] = ' {"city":"Köln <|im_end|>"}'
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "rain"}]},
    ]
    response = await client.post(
        "/v1/chat/completions", json={**ASKED, "messages": messages, "tool_choice": "auto"}
    )
    assert response.status_code == 200, response.text
    prompt = prompt_of(bench)
    shown = copy.deepcopy(TOOL)
    assert json.dumps(shown, ensure_ascii=False) in prompt
    assert '{"name": "weather", "arguments": {"city": "Köln <|im_end|>"}}\n</tool_call>' in prompt
    assert "<|im_start|>tool\nrain<|im_end|>" in prompt
    (request,) = bench.backend.requests
    # Of the template's own, one a turn; what the client wrote is text.
    assert request.prompt_token_ids.count(2) == 4


DEEPSEEK = (
    "{%- for m in messages -%}{{ m['content'] }}{%- for tool in m['tool_calls'] or [] -%}"
    "{{ '<｜tool▁calls▁begin｜>' + tool['function']['arguments'] + '.' }}"
    "{%- endfor -%}{%- endfor -%}{%- if tools -%}{%- endif -%}"
)


@pytest.mark.parametrize("template", [DEEPSEEK])
async def test_a_template_that_adds_arguments_to_text_gets_text(client, bench):
    messages = [call_of('{"city":"Köln"}'), {"role": "user", "content": "x"}]
    await client.post("/v1/chat/completions", json={**ASKED, "messages": messages})
    assert prompt_of(bench).endswith('begin｜>{"city": "Köln"}.x')


async def test_without_a_choice_tools_are_kept_from_the_model(openai_client, bench):
    answer = await openai_client.chat.completions.create(**ASKED, tool_choice="none")
    assert answer.choices[0].message.content == CALLS
    assert "weather" not in prompt_of(bench)


@pytest.mark.parametrize("choice", ["required", NAMED])
async def test_forced_calls_have_a_grammar(openai_client, bench, choice):
    await openai_client.chat.completions.create(**ASKED, tool_choice=choice)
    (request,) = bench.backend.requests
    assert ("now" in request.grammar) == (choice == "required")
    assert "weather" in request.grammar
    assert "weather" in prompt_of(bench)
    assert "now" in prompt_of(bench)


async def test_a_strict_function_has_a_grammar_without_being_asked_for(openai_client, bench):
    strict = copy.deepcopy(TOOL)
    strict["function"]["strict"] = True
    await openai_client.chat.completions.create(**ASKED | {"tools": [strict]})
    await openai_client.chat.completions.create(**ASKED)
    first, second = bench.backend.requests
    assert "weather" in first.grammar
    assert second.grammar == ""


async def test_an_answer_in_a_schema_leaves_room_for_calls(openai_client, bench):
    schema = {"name": "x", "schema": PARAMETERS}
    await openai_client.chat.completions.create(
        **ASKED, response_format={"type": "json_schema", "json_schema": schema}
    )
    (request,) = bench.backend.requests
    assert "tool_call" in request.grammar


async def test_a_stop_string_ends_before_the_call(openai_client):
    answer = await openai_client.chat.completions.create(**ASKED, stop=["<tool_call>"])
    assert answer.choices[0].message.content == "Let me see.\n"
    assert answer.choices[0].finish_reason == "stop"


class TestThinking:
    """A model whose template begins the thinking."""

    @pytest.fixture
    def template(self):
        return THINKING

    async def test_thinking_has_a_place_of_its_own(self, openai_client, told):
        told.text = "I wonder.\n</think>\n\n" + CALLS
        answer = await openai_client.chat.completions.create(**ASKED)
        message = answer.choices[0].message
        assert message.reasoning_content == message.reasoning == "I wonder."
        assert message.content == "Let me see."
        assert len(message.tool_calls) == 2

    async def test_thinking_streams(self, openai_client, told):
        told.text = "I wonder.\n</think>\n\nYes."
        stream = await openai_client.chat.completions.create(
            model="tiny", messages=ASKED["messages"], stream=True
        )
        deltas = [chunk.choices[0].delta async for chunk in stream]
        thought = [getattr(delta, "reasoning_content", None) or "" for delta in deltas]
        assert "".join(thought) == "I wonder."
        assert thought == [getattr(delta, "reasoning", None) or "" for delta in deltas]
        assert "".join(delta.content or "" for delta in deltas) == "Yes."

    async def test_it_may_be_left_out_of_the_answer(self, client, told):
        told.text = "I wonder.\n</think>\n\nYes."
        body = {**ASKED, "include_reasoning": False}
        response = await client.post("/v1/chat/completions", json=body)
        message = response.json()["choices"][0]["message"]
        assert message == {"role": "assistant", "content": "Yes.", "refusal": None}

    @pytest.mark.parametrize(
        "fields",
        [{"reasoning_effort": "none"}, {"chat_template_kwargs": {"enable_thinking": False}}],
    )
    async def test_it_can_be_turned_off(self, client, bench, told, fields):
        told.text = "Yes."
        response = await client.post("/v1/chat/completions", json={**ASKED, **fields})
        assert response.json()["choices"][0]["message"]["content"] == "Yes."
        assert not prompt_of(bench).endswith("<think>\n")

    async def test_structure_begins_after_it(self, client, bench, told):
        told.text = 'Hm.</think>{"city": "x"}'
        schema = {"name": "x", "schema": PARAMETERS}
        body = {**ASKED, "response_format": {"type": "json_schema", "json_schema": schema}}
        del body["tools"]
        response = await client.post("/v1/chat/completions", json=body)
        message = response.json()["choices"][0]["message"]
        assert (message["content"], message["reasoning"]) == ('{"city": "x"}', "Hm.")
        assert "</think>" in bench.backend.requests[0].grammar

    async def test_what_cannot_wait_for_it_begins_at_once(self, client, told):
        told.text = "yes"
        body = {**ASKED, "tools": [], "guided_choice": ["yes", "no"]}
        response = await client.post("/v1/chat/completions", json=body)
        assert response.json()["choices"][0]["message"]["content"] == "yes"


async def test_pieces_of_a_stream_that_moved_are_one_call(openai_client, bench):
    """A move cuts outputs anywhere and the parser, in the ingress, goes on where it was."""

    def script(request):
        token_ids = [*bench.tokenizer.ids(CALLS), 2]
        outputs = [
            StepOutput(request.request_id, token_ids[i : i + 7])
            for i in range(0, len(token_ids), 7)
        ]
        outputs[-1].finish_reason, outputs[-1].stop_token_id = FinishReason.STOP, 2
        return outputs

    bench.backend.script = script
    async with openai_client.chat.completions.stream(**ASKED) as stream:
        answer = await stream.get_final_completion()
    (weather, _) = answer.choices[0].message.tool_calls
    jsonschema.validate(json.loads(weather.function.arguments), PARAMETERS)
