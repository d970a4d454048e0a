"""A thinking budget by every protocol's name for it: the same request to engines, and a text whose
thinking ends where it has to."""

import pytest
import pytest_asyncio

from service.api.grpc import build_grpc_server
from service.proto import inference_pb2 as pb
from service.proto import inference_pb2_grpc as pb_grpc
from tests.fakes.backend import make_outputs
from tests.fakes.chats import Told, make_told_bench
from tests.unit.service.api.test_tools import THINKING

pytestmark = pytest.mark.asyncio
THOUGHT = "I wonder and wonder and wonder."
ANSWER = "Yes."
BUDGET = 3
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture
def bench(tmp_path):
    made = make_told_bench(tmp_path, Told(""), THINKING)

    def script(request):
        text = ANSWER if request.resumed_token_ids else f"{THOUGHT}</think>{ANSWER}"
        return make_outputs(request, [*made.tokenizer.ids(text), 2])

    made.backend.script = script
    return made


@pytest_asyncio.fixture
async def stub(services):
    server, port = build_grpc_server(services, "127.0.0.1:0")
    await server.start()
    channel = pb_grpc.grpc.aio.insecure_channel(f"127.0.0.1:{port}")
    yield pb_grpc.InferenceStub(channel)
    await channel.close()
    await server.stop(None)


def begun(bench):
    """What the thinking is cut to."""
    ids = bench.tokenizer.ids(THOUGHT)[:BUDGET]
    return b"".join(bench.handler.token_bytes(ids)).decode()


def check_engine(bench):
    first, second = bench.backend.requests
    end_ids = bench.tokenizer.ids("</think>")
    assert first.resumed_token_ids == []
    assert second.resumed_token_ids == bench.tokenizer.ids(THOUGHT)[:BUDGET] + end_ids
    assert first.sampling.seed == second.sampling.seed is not None
    assert bench.backend.num_live == 0


@pytest.mark.parametrize("is_stream", [False, True])
async def test_of_openais_chats(openai_client, bench, is_stream):
    asked = {
        "model": "tiny",
        "messages": MESSAGES,
        "max_tokens": 300,
        "stream": is_stream,
        "extra_body": {"thinking_token_budget": BUDGET},
    }
    answer = await openai_client.chat.completions.create(**asked)
    if is_stream:
        deltas = [chunk.choices[0].delta async for chunk in answer]
        thought = "".join(getattr(delta, "reasoning", None) or "" for delta in deltas)
        content = "".join(delta.content or "" for delta in deltas)
    else:
        thought, content = answer.choices[0].message.reasoning, answer.choices[0].message.content
    assert (thought, content) == (begun(bench).strip(), ANSWER)
    check_engine(bench)


async def test_of_anthropics_messages(client, bench):
    body = {
        "max_tokens": 300,
        "messages": MESSAGES,
        "thinking": {"type": "enabled", "budget_tokens": BUDGET},
    }
    answer = (await client.post("/v1/messages", json=body)).json()
    thinking, text = answer["content"]
    assert (thinking["thinking"], text["text"]) == (begun(bench).strip(), ANSWER)
    check_engine(bench)


async def test_of_responses(client, bench):
    body = {"input": "hi", "max_output_tokens": 300, "reasoning": {"max_tokens": BUDGET}}
    answer = (await client.post("/v1/responses", json={**body, "store": False})).json()
    assert answer["output"][-1]["content"][0]["text"] == ANSWER
    check_engine(bench)


async def test_of_grpc(stub, bench):
    chat = pb.Chat(messages=[pb.Message(role="user", content="hi")], thinking_token_budget=BUDGET)
    answer = await stub.Generate(
        pb.GenerateRequest(chat=chat, sampling=pb.SamplingParams(max_tokens=300))
    )
    assert (answer.choices[0].reasoning, answer.choices[0].text) == (begun(bench).strip(), ANSWER)
    check_engine(bench)


async def test_every_choice_has_its_own(client, bench):
    body = {"messages": MESSAGES, "n": 2, "thinking_token_budget": BUDGET, "max_tokens": 300}
    answer = (await client.post("/v1/chat/completions", json=body)).json()
    assert [choice["message"]["content"] for choice in answer["choices"]] == [ANSWER] * 2
    assert len(bench.backend.requests) == 4


@pytest.mark.parametrize(
    "extra", [{"logprobs": True}, {"use_beam_search": True}, {"n": 1, "best_of": 2}]
)
async def test_what_is_said_for_the_model_has_no_log_probabilities(client, bench, extra):
    body = {"messages": MESSAGES, "thinking_token_budget": BUDGET, **extra}
    error = (await client.post("/v1/chat/completions", json=body)).json()["error"]
    assert (error["code"], error["param"]) == ("invalid_request", "thinking_token_budget")
    assert bench.backend.requests == []
