"""The Responses API at its ceilings: what reading, answering, keeping and finding cost the loop.

Judged as in test_loop_lag.py. Texts are not really encoded: tokenizer processes do that.
"""

import json
import random

import msgspec
import pytest

from service.api.auth import OpenAuthenticator
from service.api.http import build_http_app
from service.api.services import ApiServices
from service.limits import MAX_STORED_BYTES, Limits
from service.response_store.runs import Runs
from service.response_store.store import LocalResponseStore
from tests.fakes.backend import MODEL_INFO
from tests.fakes.called import Called
from tests.fakes.loop_probe import MAX_UNITS, held_units
from tests.fakes.text import make_bench
from workers.builtin.tokenizer import CHAT_TEMPLATE
from workers.engine.logprobs import TokenLogprobs
from workers.engine.protocol import FinishReason, StepOutput

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(240)]
LIMITS = Limits(max_stored_response_bytes=MAX_STORED_BYTES)
RESPONSES = "/v1/responses"
TEXT = "x" * (LIMITS.max_prompt_bytes - 200)
OTHER_SCRIPT = "é🙂" * (LIMITS.max_prompt_bytes // 6 - 200)
NUM_TOP = LIMITS.max_logprobs
NUM_SHOWN = LIMITS.max_logprob_entries // (NUM_TOP + 1) - 64
NUM_LONG = 1 << 19
WIDE = {str(i): {} for i in range(15_000)}


@pytest.fixture
def bench(tmp_path, monkeypatch):
    info = msgspec.structs.replace(MODEL_INFO, max_context_len=1 << 22, max_request_len=1 << 22)
    made = make_bench(tmp_path, limits=LIMITS, info=info, chat_template=CHAT_TEMPLATE)

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
        responses=Runs(
            "here", LocalResponseStore(LIMITS.of_store), LIMITS.max_stored_response_bytes
        ),
    )
    return Called(build_http_app(services))


def user(content):
    return {"role": "user", "content": content}


def parts(number, text="x" * 100):
    return user([{"type": "input_text", "text": text}] * number)


def calls(number, arguments='{"a":1}'):
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments}
    result = {"type": "function_call_output", "call_id": "c", "output": "x" * 900}
    return [call, result] * number


def tool(**more):
    return {"type": "function", "name": "f", "parameters": {"type": "object"}, **more}


TAKEN = {
    "a text of the most bytes": {"input": TEXT},
    "a text of the most bytes of other scripts": {"input": OTHER_SCRIPT},
    "the most items": {"input": [user("x" * 4000)] * LIMITS.max_messages},
    "the most items in a body that is read at once": {"input": [user("x")] * LIMITS.max_messages},
    "many parts": {"input": [parts(120)] * 80},
    "items of parts": {"input": [parts(9, "x" * 400)] * LIMITS.max_messages},
    "instructions of the most bytes": {"input": "x", "instructions": OTHER_SCRIPT},
    "many calls": {"input": calls(LIMITS.max_messages // 2)},
    "calls of many values": {"input": calls(2, json.dumps(["x"] * 14_000).join(('{"a":', "}")))},
    "a tool of the most bytes": {"input": "x", "tools": [tool(description=TEXT[:-2000])]},
    "what was thought": {
        "input": [
            {
                "type": "reasoning",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "x"}],
            },
            user("x"),
        ]
        * (LIMITS.max_messages // 2)
    },
}
REFUSED = {
    "too many items": {"input": [user("x")] * 4096},
    "items that are none": {"input": [{"type": "nothing"}] * 4000},
    "items without a kind": {"input": [{"a": 1}] * 4000},
    "parts that are none": {"input": [user([{"type": "x"}] * 100)] * 50},
    "references to nothing": {"input": [{"type": "item_reference", "id": "x" * 200}] * 1000},
    "references to other responses": {
        "input": [{"type": "item_reference", "id": f"msg_{i:048x}_0"} for i in range(1000)]
    },
    "results of nothing": {"input": calls(1)[1:] * 1000},
    "too many values of calls": {"input": calls(4, '{"a":[' + "1," * 10_000 + "1]}")},
    "deep arguments": {"input": calls(1, "[" * 60_000)},
    "a schema": {"input": "x", "tools": [tool(parameters={"properties": WIDE}, strict=True)]},
    "a schema of an answer": {
        "input": "x",
        "text": {"format": {"type": "json_schema", "name": "f", "schema": {"properties": WIDE}}},
    },
    "metadata": {"input": "x", "metadata": {str(i): "y" * 500 for i in range(1000)}},
    "a long previous id": {"input": "x", "previous_response_id": TEXT},
    "a long user": {"input": "x", "user": TEXT},
    "log probabilities of an old answer": {
        "input": [
            {
                "role": "assistant",
                "content": [{"type": "output_text", "text": "x", "logprobs": [{"a": []}] * 30_000}],
            }
        ]
        * 2
    },
    "allowed tools": {
        "input": "x",
        "tools": [tool()],
        "tool_choice": {
            "type": "allowed_tools",
            "mode": "auto",
            "tools": [{"type": "function", "name": "y" * 60}] * 2000,
        },
    },
}


async def ask(called, **fields):
    body = {"max_output_tokens": 1, **fields}
    data = json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode()
    assert len(data) <= LIMITS.max_body_bytes
    return await held_units(lambda: called.post(RESPONSES, data))


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("name", TAKEN)
async def test_requests_at_the_ceilings_are_taken(called, name, is_stream):
    (status, answer), held = await ask(called, **TAKEN[name], stream=is_stream)
    assert status == 200, answer[:200]
    assert b'"store":true' in answer
    assert held < MAX_UNITS


@pytest.mark.parametrize("name", REFUSED)
async def test_requests_beyond_the_ceilings_are_refused(called, name):
    (status, answer), held = await ask(called, **REFUSED[name])
    assert 400 <= status < 500, answer[:200]
    assert held < MAX_UNITS


def _script(num_tokens, num_top):
    rng = random.Random(3)
    ids = [rng.sample(range(3, 400), NUM_TOP) for _ in range(64)]
    entries = [TokenLogprobs(-1.25, 3, top, [-0.5 * i for i in range(NUM_TOP)]) for top in ids] * 4
    outputs = [
        StepOutput("", [5] * 256, logprobs=entries if num_top else None)
        for _ in range(num_tokens // 256)
    ]
    outputs[-1].finish_reason = FinishReason.LENGTH
    return outputs


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("num_top", "num_tokens"),
    [
        (0, NUM_LONG),
        # Seconds at the ceiling; an eighth is dozens of what one turn of the loop may take.
        (NUM_TOP, NUM_SHOWN // 8),
        pytest.param(NUM_TOP, NUM_SHOWN, marks=pytest.mark.nightly),
    ],
)
async def test_long_answers(bench, called, is_stream, num_top, num_tokens):
    made = _script(num_tokens, num_top)
    bench.backend.script = lambda request: list(made)
    asked = {"input": "x", "max_output_tokens": num_tokens, "stream": is_stream}
    if num_top:
        asked |= {"include": ["message.output_text.logprobs"], "top_logprobs": num_top}
    data = json.dumps(asked).encode()
    (status, answer), held = await held_units(lambda: called.post_and_forget(RESPONSES, data))
    assert status == 200
    assert answer.endswith(b'"annotations":[]}]}]}' + b"}\n\n" * is_stream)
    assert held < MAX_UNITS


async def test_what_is_kept_is_found(called):
    text = OTHER_SCRIPT[: len(OTHER_SCRIPT) // 2]
    (_, answer), _ = await ask(called, input=text)
    first = json.loads(answer)
    assert first["store"] is True
    (status, answer), held = await ask(
        called, input=text, previous_response_id=first["id"], stream=True
    )
    assert (status, b'"store":true' in answer) == (200, True), answer[:200]
    assert held < MAX_UNITS
    for path in ("", "/input_items"):
        (status, answer), held = await held_units(
            lambda path=path: called.get(f"{RESPONSES}/{first['id']}{path}")
        )
        assert status == 200
        assert (text[:1000] in answer.decode()) == bool(path)
        assert held < MAX_UNITS


async def test_many_items_are_found(called):
    items = [user("x" * 4000)] * LIMITS.max_messages
    _, answer = await called.post(RESPONSES, json.dumps({"input": items}).encode())
    response = json.loads(answer)
    path = f"{RESPONSES}/{response['id']}/input_items"
    (status, answer), held = await held_units(lambda: called.get(path, b"limit=100"))
    assert (status, len(json.loads(answer)["data"])) == (200, 100)
    assert held < MAX_UNITS
    item = json.loads(answer)["data"][-1]
    references = [{"type": "item_reference", "id": item["id"]}] * 200
    (status, answer), held = await ask(called, input=[*references, user("x")])
    assert status == 200, answer[:200]
    assert held < MAX_UNITS
