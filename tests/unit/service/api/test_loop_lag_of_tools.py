"""Tools, calls and answers made to be slow: none keeps an ingress's other streams waiting.

Judged as in test_loop_lag.py.
"""

import json

import pytest

from service.api.auth import OpenAuthenticator
from service.api.call_arguments import object_part
from service.api.grpc import InferenceServicer
from service.api.grpc_calls import parse
from service.api.http import build_http_app
from service.api.openai.json_parts import JsonParts
from service.api.openai.wire import encode_json
from service.api.services import ApiServices
from service.chat.options import Tool
from service.chat.reasoning import STYLES, ReasoningParser
from service.chat.tools.families import FAMILIES
from service.chat.tools.values import argument_json
from service.errors import ApiError
from service.limits import MAX_ITEMS, MAX_OTHER_ITEMS
from service.proto import inference_pb2 as pb
from tests.fakes.called import Called, UnconnectedCall
from tests.fakes.chats import ASKED, TOOL, Told, call_of, make_told_bench, tool
from tests.fakes.loop_probe import MAX_UNITS, held_units
from workers.builtin.tokenizer import CHAT_TEMPLATE

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(240)]


@pytest.fixture
def bench(tmp_path, monkeypatch):
    made = make_told_bench(tmp_path, Told(""), CHAT_TEMPLATE)

    async def encode(job, flow):
        return [5] * 8

    monkeypatch.setattr(made.tokenizer, "encode_chat", encode)
    return made


@pytest.fixture
def called(bench):
    services = ApiServices(
        models=bench.models,
        authenticator=OpenAuthenticator(),
        is_ready=lambda: True,
        version="0",
        started_s=0,
    )
    return Called(build_http_app(services))


def deep(values, depth):
    for _ in range(depth):
        values = [values]
    return values


def calling(arguments):
    return {"messages": [call_of(json.dumps(arguments))]}


CASES = {
    "many calls": (200, {"messages": [call_of("")] * 900}),
    "values of a call": (200, calling({"a": ["x"] * 30_000})),
    "deep values of a call": (200, calling({"a": deep(["x"] * 30_000, 55)})),
    "code in a call": (200, calling({"a": "f(x, [y: {z}])," * 50_000})),
    "too many values of calls": (400, calling({"a": deep(["x"] * 250_000, 55)})),
    "deep values of a tool": (
        200,
        {"tools": [tool(parameters={"enum": deep(["x"] * (MAX_OTHER_ITEMS - 500), 120)})]},
    ),
    "the text of a schema": (
        400,
        {"tools": [TOOL], "guided_json": '{"enum":[' + "1," * 3_000_000 + "1]}"},
    ),
}


@pytest.mark.parametrize("name", CASES)
async def test_requests_do_not_hold_the_loop(called, name):
    expected, fields = CASES[name]
    data = json.dumps({**ASKED, **fields}).encode()
    (status, answer), held = await held_units(lambda: called.post("/v1/chat/completions", data))
    assert status == expected, answer[:200]
    assert held < MAX_UNITS


def grpc_calls(*arguments):
    calls = [pb.ToolCall(id="c", name="f", arguments=text) for text in arguments]
    return [pb.Message(role="assistant", tool_calls=calls)]


def grpc_tools(number, schema):
    return [pb.Tool(name=f"f{index}", parameters_json=schema) for index in range(number)]


GRPC_CASES = {
    "many calls": (True, {"messages": grpc_calls(*["{}"] * MAX_ITEMS)}),
    "commas in a call": (True, {"messages": grpc_calls('{"a":"' + "," * 4_000_000 + '"}')}),
    "escapes in a call": (False, {"messages": grpc_calls('{"a":"' + "\\n" * 3_900_000 + '"}')}),
    "values of tools": (True, {"tools": grpc_tools(2, '{"a":[' + "{}," * 16_000 + "1]}")}),
    "too many values": (False, {"tools": grpc_tools(2, '{"a":[' + "{}," * 43_000 + "1]}")}),
    "too many tools": (
        False,
        {"tools": grpc_tools(MAX_ITEMS, '{"a":' + "[" * 20 + "]" * 20 + "}")},
    ),
}


@pytest.mark.parametrize("method", ["generate", "tokenize"])
@pytest.mark.parametrize("name", GRPC_CASES)
async def test_grpc_chats_do_not_hold_the_loop(bench, method, name):
    is_taken, chat = GRPC_CASES[name]
    request_type = {"generate": pb.GenerateRequest, "tokenize": pb.TokenizeRequest}[method]
    messages = [pb.Message(role="user", content="hi"), *chat.get("messages", ())]
    given = request_type(chat=pb.Chat(messages=messages, tools=chat.get("tools", ())))
    data = given.SerializeToString()
    servicer = InferenceServicer(bench.models)

    async def ask():
        try:
            request = await parse(request_type, data, bench.models.limits.max_prompt_tokens)
            await getattr(servicer, method)(request, UnconnectedCall())
        except ApiError as error:
            return error
        return None

    error, held = await held_units(ask)
    assert (error is None) == is_taken, error
    assert held < MAX_UNITS


def tool_parser(family, text):
    def read():
        parser = FAMILIES[family]({"f": Tool("f", {})}, lambda: "id", is_parallel=True)
        parser.push(text)
        parser.flush()

    return read


def thinking(text):
    return lambda: ReasoningParser(STYLES["think"], is_open=True).push(text)


# Such as the most tokens that are read in one go, each of the most blanks that tokens have.
BLANKS = "x" + " " * 9_000
NUMBERS = "[" + "1," * 32_000 + "'']"
ARGUMENTS = '{"a":' + "[1," * 100 + "1," * 500_000 + "1"
CLOSED = ARGUMENTS + "]" * 100 + "}"
READINGS = {
    "arguments that become an object": lambda: object_part(CLOSED, JsonParts()),
    "arguments that were cut": lambda: encode_json(object_part(ARGUMENTS, JsonParts())),
    "arguments that are none": lambda: object_part('{"a"' + '"b' * 500_000, JsonParts()),
    "blanks": tool_parser("hermes", BLANKS),
    "blanks of thinking": thinking(BLANKS),
    "a list of Python's": lambda: argument_json(NUMBERS, {}),
    "strings without an end": lambda: argument_json("'\\'" * 32_000, {}),
}


@pytest.mark.parametrize("name", READINGS)
async def test_reading_an_answer_does_not_hold_the_loop(name):
    async def read():
        READINGS[name]()

    _, held = await held_units(read)
    assert held < MAX_UNITS
