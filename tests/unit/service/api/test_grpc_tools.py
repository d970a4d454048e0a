"""Chats with tools and thinking over gRPC: what goes to the template and the engine, what comes
back whole and in parts, and every refusal by its name. What parsers read is tested over HTTP."""

import json

import grpc
import pytest
import pytest_asyncio

from service.proto import inference_pb2 as pb
from service.proto import inference_pb2_grpc as pb_grpc
from tests.fakes.chats import PARAMETERS, Told, make_told_bench
from tests.unit.service.api.test_tools import CALLS, THINKING, prompt_of
from workers.builtin.tokenizer import CHAT_TEMPLATE

pytestmark = pytest.mark.asyncio

WEATHER = pb.Tool(name="weather", description="now", parameters_json=json.dumps(PARAMETERS))
USER = pb.Message(role="user", content="hi")
EXPECTED = [("weather", '{"city": "Köln"}'), ("now", "{}")]


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
async def stub(serve_grpc):
    return pb_grpc.InferenceStub((await serve_grpc())())


def asked(**chat):
    given = {"messages": [USER], "tools": [WEATHER, pb.Tool(name="now")], **chat}
    return pb.GenerateRequest(chat=given, sampling={"max_tokens": 300})


async def test_calls_and_content_come_apart(stub):
    (choice,) = (await stub.Generate(asked())).choices
    assert choice.finish_reason == pb.FINISH_REASON_TOOL_CALLS
    assert choice.text == "Let me see."
    assert [(call.name, call.arguments) for call in choice.tool_calls] == EXPECTED
    assert [call.index for call in choice.tool_calls] == [0, 1]
    assert len({call.id for call in choice.tool_calls}) == 2


async def test_a_stream_names_each_call_once_and_then_brings_its_arguments(stub):
    request = asked()
    request.n = 2
    choices = [chunk.choice async for chunk in stub.GenerateStream(request)]
    for index in range(2):
        mine = [choice for choice in choices[:-1] if choice.index == index]
        assert "".join(choice.text for choice in mine) == "Let me see."
        calls = [call for choice in mine for call in choice.tool_calls]
        assert [(call.index, call.name) for call in calls if call.id] == [
            (0, "weather"),
            (1, "now"),
        ]
        for position, (_, arguments) in enumerate(EXPECTED):
            pieces = [call.arguments for call in calls if call.index == position]
            assert "".join(pieces) == arguments
        assert mine[-1].finish_reason == pb.FINISH_REASON_TOOL_CALLS


@pytest.mark.parametrize("template", [THINKING])
@pytest.mark.parametrize("is_shown", [True, False])
async def test_thinking_comes_apart_from_the_answer(stub, told, is_shown):
    told.text = "It is\nlate.\n</think>\n\nGood night."
    request = asked(tools=[], include_reasoning=is_shown)
    (whole,) = (await stub.Generate(request)).choices
    parts = [chunk.choice async for chunk in stub.GenerateStream(request)]
    wanted = ("It is\nlate." if is_shown else "", "Good night.")
    assert (whole.reasoning, whole.text) == wanted
    assert ("".join(p.reasoning for p in parts), "".join(p.text for p in parts)) == wanted


@pytest.mark.parametrize("template", [THINKING])
async def test_an_effort_goes_to_the_template(stub, bench):
    await stub.Generate(asked(reasoning_effort="none"))
    assert "<think>" not in prompt_of(bench)


async def test_tools_calls_and_results_go_to_the_template(stub, bench):
    call = pb.ToolCall(id="call_1", name="weather", arguments='{"city": "Rome"}')
    await stub.Generate(
        asked(
            messages=[
                USER,
                pb.Message(role="assistant", tool_calls=[call]),
                pb.Message(role="tool", tool_call_id="call_1", content="It rains."),
            ]
        )
    )
    prompt = prompt_of(bench)
    assert all(text in prompt for text in ('"maxLength": 20', '{"city": "Rome"}', "It rains."))


async def test_no_choice_hides_tools_and_a_named_one_is_forced(stub, bench):
    (choice,) = (await stub.Generate(asked(tool_choice=pb.TOOL_CHOICE_NONE))).choices
    assert (choice.text, list(choice.tool_calls)) == (CALLS, [])
    await stub.Generate(asked(tool_choice=pb.TOOL_CHOICE_REQUIRED, parallel_tool_calls=False))
    await stub.Generate(asked(tool_choice_function="now"))
    free, required, named = bench.backend.requests
    assert not free.grammar
    assert "weather" in required.grammar
    assert "weather" not in named.grammar


@pytest.mark.parametrize(
    ("chat", "param"),
    [
        ({"tools": [pb.Tool(name="a b")]}, "tools.function.name"),
        ({"tools": [pb.Tool(name="f"), pb.Tool(name="f")]}, "tools.function.name"),
        ({"tools": [pb.Tool(name="f", parameters_json="[")]}, "tools.parameters_json"),
        ({"tools": [pb.Tool(name=f"f{i}") for i in range(4)]}, "tools"),
        ({"tools": [pb.Tool(name="f", parameters_json=" " * (1 << 19))]}, "tools"),
        ({"tools": [], "tool_choice": pb.TOOL_CHOICE_REQUIRED}, "tool_choice"),
        ({"tool_choice": 9}, "tool_choice"),
        ({"tool_choice_function": "other"}, "tool_choice"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"messages": [pb.Message(role="tool", content="x")]}, "messages.tool_call_id"),
        (
            {"messages": [pb.Message(role="user", tool_calls=[pb.ToolCall(id="c")])]},
            "messages.tool_calls",
        ),
        (
            {"messages": [pb.Message(role="assistant", tool_calls=[pb.ToolCall(arguments="[]")])]},
            "messages.tool_calls.function.arguments",
        ),
    ],
)
async def test_it_refuses_by_name(stub, bench, chat, param):
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await stub.Generate(asked(**chat))
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert dict(raised.value.trailing_metadata())["tessera-error-param"] == param
    assert not bench.backend.requests
