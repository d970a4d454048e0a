"""Requests as large as the ceilings let them be, and beyond: what reading and refusing them costs.

Judged as in test_loop_lag.py. Texts are not really encoded: tokenizer processes do that.
"""

import json

import pytest

from service.api.auth import OpenAuthenticator
from service.api.grpc import InferenceServicer
from service.api.grpc_calls import parse
from service.api.http import build_http_app
from service.api.services import ApiServices
from service.errors import ApiError
from service.limits import MAX_OTHER_ITEMS, Limits
from service.proto import inference_pb2 as pb
from tests.fakes.called import Called, UnconnectedCall
from tests.fakes.loop_probe import MAX_UNITS, held_units
from tests.fakes.text import make_bench

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(240)]
LIMITS = Limits()
MIB = 1 << 20
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TEXT = "x" * LIMITS.max_prompt_bytes
OTHER_SCRIPT = "é🙂" * (LIMITS.max_prompt_bytes // 6)


@pytest.fixture
def bench(tmp_path, monkeypatch):
    made = make_bench(tmp_path)

    async def encode(job, flow):
        return [5] * 8

    monkeypatch.setattr(made.tokenizer, "encode_text", encode)
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


def user(content):
    return {"role": "user", "content": content}


def parts(number, text="x" * 100):
    return user([{"type": "text", "text": text}] * number)


def completion(**fields):
    return COMPLETIONS, {"prompt": "x", "max_tokens": 1, **fields}


def chat(*messages, **fields):
    return CHAT, {"messages": messages, "max_tokens": 1, **fields}


def message(*messages, **fields):
    return "/v1/messages", {"messages": messages, "max_tokens": 1, **fields}


def calls(number, values):
    call = {"type": "tool_use", "id": "c", "name": "f", "input": {"a": values}}
    return {"role": "assistant", "content": [call] * number}


TAKEN = {
    "a chat of the most messages": lambda: chat(*[user("x" * 4090)] * LIMITS.max_messages),
    "a chat of the most messages in a body that is read at once": lambda: chat(
        *[user("x")] * LIMITS.max_messages
    ),
    "a message of the most bytes": lambda: chat(user(TEXT[:-100])),
    "a message of the most bytes of other scripts": lambda: chat(user(OTHER_SCRIPT[:-100])),
    "messages of many parts": lambda: chat(*[parts(120)] * 80),
    "many messages of parts": lambda: chat(*[parts(9, "x" * 400)] * LIMITS.max_messages),
    "a text of the most bytes": lambda: completion(prompt=TEXT),
    "a text of the most bytes of other scripts": lambda: completion(prompt=OTHER_SCRIPT),
    "the most texts": lambda: completion(prompt=["x" * (127 << 10)] * LIMITS.max_prompts),
    "the most sequences": lambda: completion(prompt=["x"] * LIMITS.max_prompts, n=LIMITS.max_n),
    "the most sequences of many ids": lambda: completion(
        prompt=[[5] * 50] * LIMITS.max_prompts, n=LIMITS.max_n
    ),
    "the most escaped characters": lambda: completion(prompt="\n" * LIMITS.max_body_escapes),
    "a long name that nobody looks at": lambda: completion(user="x" * (8 * MIB - 200)),
    "a text to be counted": lambda: ("/tokenize", {"prompt": TEXT}),
    "a chat to be counted": lambda: (
        "/tokenize",
        {"messages": [user("x" * 4090)] * LIMITS.max_messages},
    ),
    "the most messages of Anthropic's": lambda: message(*[user("x" * 4090)] * LIMITS.max_messages),
    "the most messages of Anthropic's in turns": lambda: message(
        *[user("x"), {"role": "assistant", "content": "y"}] * (LIMITS.max_messages // 2 - 1),
        user("x"),
    ),
    "many blocks": lambda: message(*[parts(120)] * 80),
    "one turn of many blocks": lambda: message(*[parts(9, "x" * 400)] * LIMITS.max_messages),
    "a system of the most bytes": lambda: message(user("x"), system=OTHER_SCRIPT[:-100]),
    "calls of many values": lambda: message(calls(1, ["x"] * 30_000), user("x")),
    "many calls": lambda: message(calls(250, ["x"] * 30), user("x")),
    "many messages of calls": lambda: message(*[calls(5, ["x"] * 8), user("x")] * 300),
    "many results": lambda: message(
        *[user([{"type": "tool_result", "tool_use_id": "c", "content": "x" * 900}] * 200)] * 5
    ),
    "messages to be counted": lambda: (
        "/v1/messages/count_tokens",
        {"messages": [user("x" * 4090)] * LIMITS.max_messages},
    ),
}
EMBEDDINGS = "/v1/embeddings"
TAKEN["the most inputs"] = lambda: (EMBEDDINGS, {"input": ["x"] * LIMITS.max_inputs})
TAKEN["the most inputs of ids"] = lambda: (EMBEDDINGS, {"input": [[5] * 400] * LIMITS.max_inputs})
WIDE = {str(i): {} for i in range(15_000)}
REFUSED = {
    "too many messages": lambda: chat(*[user("x")] * 4096),
    "messages that are none": lambda: chat(*[{"role": "nobody", "content": "x"}] * 1000),
    "parts that are none": lambda: chat(*[user([{"type": "x"}] * 100)] * 50),
    "unknown names": lambda: completion(**{f"k{i}": "y" * 100 for i in range(32_000)}),
    "unknown names in a body that is read at once": lambda: completion(
        **{f"k{i}": 1 for i in range(6000)}
    ),
    "biases": lambda: completion(logit_bias={str(i): 1 for i in range(32_000)}),
    "stop strings": lambda: completion(stop=["y" * 120] * 65_000),
    "stop ids": lambda: completion(stop_token_ids=[5] * MIB),
    "a schema": lambda: chat(
        user("x"), tools=[{"type": "function", "function": {"parameters": WIDE}}]
    ),
    "a schema of an answer": lambda: chat(
        user("x"), response_format={"type": "json_schema", "json_schema": {"schema": WIDE}}
    ),
    "a schema of many values": lambda: completion(guided_json={"enum": ["y" * 100] * 60_000}),
    "a regular expression": lambda: completion(guided_regex="x" * (8 * MIB - 200)),
    "choices": lambda: completion(guided_choice=["y" * 120] * 65_000),
    "arguments of a template": lambda: chat(user("x"), chat_template_kwargs={"a": ["x"] * 60_000}),
    "numbers with a point": lambda: completion(prompt=[0.1234567890123456] * 65_000),
    "numbers below nothing": lambda: completion(prompt=[-5] * MIB),
    "huge numbers": lambda: completion(prompt=[1 << 63] * 400_000),
    "more values than are read in one go": lambda: completion(
        prompt=[[*[5] * 20_000, "x"]] * (MAX_OTHER_ITEMS // 20_000 + 2)
    ),
    "more escaped characters": lambda: completion(prompt="\n" * (LIMITS.max_body_escapes + 1)),
    "the most ids to be text": lambda: ("/detokenize", {"tokens": [123_456_789] * 800_000}),
    "turns that are none": lambda: message(*[{"role": "nobody", "content": "x"}] * 1000),
    "blocks that are none": lambda: message(*[user([{"type": "x"}] * 100)] * 50),
    "blocks of one kind that are none": lambda: message(*[user([{"type": "text"}] * 100)] * 50),
    "too many values of calls": lambda: message(calls(1, ["x"] * 60_000), user("x")),
    "too many turns": lambda: message(*[user("x"), {"role": "assistant", "content": "y"}] * 2048),
    "deep input of a call": lambda: message(
        calls(1, [[[["x"] * 100] * 10] * 30] * 2), user("x"), a=1
    ),
    "a schema of Anthropic's": lambda: message(
        user("x"), tools=[{"name": "f", "input_schema": WIDE}], tool_choice={"type": "any"}
    ),
    "stop sequences": lambda: message(user("x"), stop_sequences=["y" * 120] * 65_000),
    "a model without end": lambda: completion(model="x" * (8 * MIB - 200)),
}


def to_json(body):
    return json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode()


@pytest.mark.parametrize("name", TAKEN)
async def test_requests_at_the_ceilings_are_taken(called, name):
    path, body = TAKEN[name]()
    data = to_json(body)
    assert len(data) <= LIMITS.max_body_bytes
    (status, answer), held = await held_units(lambda: called.post(path, data))
    assert status == 200, answer[:200]
    assert held < MAX_UNITS


@pytest.mark.parametrize("name", REFUSED)
async def test_requests_beyond_the_ceilings_are_refused(called, name):
    path, body = REFUSED[name]()
    data = to_json(body)
    assert len(data) <= LIMITS.max_body_bytes
    (status, answer), held = await held_units(lambda: called.post(path, data))
    assert 400 <= status < 500, answer[:200]
    assert held < MAX_UNITS


BROKEN = {
    "brackets": lambda: b'{"prompt":' + b"[" * 60_000,
    "digits": lambda: b'{"prompt":"x","max_tokens":' + b"9" * (8 * MIB - 100) + b"}",
    "digits in a list": lambda: b'{"prompt":[' + b"9" * (8 * MIB - 100) + b"]}",
    "bytes": lambda: b'{"prompt":"' + b"\xff" * (8 * MIB - 100) + b'"}',
    "escapes": lambda: b'{"prompt":"' + b"\\u0041x" * MIB + b'"}',
}


@pytest.mark.parametrize("name", BROKEN)
async def test_what_is_no_request_is_refused(called, name):
    data = BROKEN[name]()
    (status, _), held = await held_units(lambda: called.post(COMPLETIONS, data))
    assert status == 400
    assert held < MAX_UNITS


async def test_the_error_says_what_is_too_much(called):
    _, answer = await called.post(*_as_sent("more values than are read in one go"))
    error = json.loads(answer)["error"]
    assert error["code"] == "limit_exceeded"
    assert f"at most {MAX_OTHER_ITEMS} values in lists besides" in error["message"]
    _, answer = await called.post(*_as_sent("more escaped characters"))
    assert f"at most {LIMITS.max_body_escapes} escaped" in json.loads(answer)["error"]["message"]


def _as_sent(name):
    path, body = REFUSED[name]()
    return path, to_json(body)


def generate(**fields):
    return pb.GenerateRequest(**fields).SerializeToString()


def sampling(**fields):
    return generate(text=pb.Text(text="x"), sampling=pb.SamplingParams(max_tokens=1, **fields))


def messages(number, **fields):
    """Read from their bytes, as a million of them take seconds to make one by one."""
    one = pb.Chat(messages=[pb.Message(**fields)]).SerializeToString()
    return pb.Chat.FromString(one * number)


ONE = pb.SamplingParams(max_tokens=1)
GRPC_TAKEN = {
    "a text": lambda: generate(text=pb.Text(text=TEXT), sampling=ONE),
    "a text of other scripts": lambda: generate(text=pb.Text(text=OTHER_SCRIPT), sampling=ONE),
    "a chat": lambda: generate(
        chat=messages(LIMITS.max_messages, role="user", content="x" * 4090), sampling=ONE
    ),
}
GRPC_REFUSED = {
    "ids": lambda: generate(token_ids=pb.TokenIds(ids=[5] * (8 * MIB - 100))),
    "ids that no model has": lambda: generate(token_ids=pb.TokenIds(ids=[150_000] * MIB)),
    "messages": lambda: generate(chat=messages(4096, role="user", content="x" * 1020)),
    "empty messages": lambda: generate(chat=messages(3 * MIB)),
    "stop strings": lambda: sampling(stop=["y" * 2000] * 4096),
    "short stop strings": lambda: sampling(stop=["yy"] * (2 * MIB)),
    "stop ids": lambda: sampling(stop_token_ids=[5] * (8 * MIB - 100)),
    "biases": lambda: sampling(logit_bias=dict.fromkeys(range(500_000), 1.0)),
    "one field again and again": lambda: generate(text=pb.Text(text="x")) * MIB,
    "unknown fields": lambda: b"\xf8\x7f\x01" * (2 * MIB),
    "a large unknown field": lambda: b"\xfa\x7f\x80\x80\x80\x03" + b"x" * (6 * MIB),
    "groups": lambda: b"\xfb\x7f\xfc\x7f" * (2 * MIB - 10),
    "groups in groups": lambda: b"\xfb\x7f" * (4 * MIB - 10),
    "a known field of another type": lambda: b"\x0d\x00\x00\x00\x00",
    "arguments of a template": lambda: generate(
        chat=pb.Chat(template_kwargs_json="[" * (8 * MIB - 99))
    ),
    "a model": lambda: generate(model="x" * (8 * MIB - 100), text=pb.Text(text="x")),
    "a salt": lambda: generate(text=pb.Text(text="x"), cache_salt="x" * (8 * MIB - 100)),
    "no text": lambda: b"\x0a\x04\xff\xff\xff\xff" * 1000,
    "half a field": lambda: b"\x0a\x7f",
    "a number without end": lambda: b"\xff" * MIB,
}


@pytest.mark.parametrize("name", GRPC_TAKEN)
async def test_grpc_messages_at_the_ceilings_are_taken(bench, name):
    call = await _ask_grpc(bench, GRPC_TAKEN[name]())
    assert pb.GenerateResponse.FromString(call.answer).choices


@pytest.mark.parametrize("name", GRPC_REFUSED)
async def test_grpc_messages_beyond_the_ceilings_are_refused(bench, name):
    call = await _ask_grpc(bench, GRPC_REFUSED[name]())
    assert isinstance(call, ApiError)


async def _ask_grpc(bench, data):
    """The answered call, or the refusal."""
    servicer = InferenceServicer(bench.models)

    async def ask():
        call = UnconnectedCall()
        try:
            request = await parse(pb.GenerateRequest, data, LIMITS.max_prompt_tokens)
            await servicer.generate(request, call)
        except ApiError as error:
            return error
        return call

    result, held = await held_units(ask)
    assert held < MAX_UNITS
    return result
