"""Requests at the ceilings of service.limits, and how long each keeps everybody else waiting.

Every answer is made on the event loop that streams to others. Judged by CPU time (see
tests.fakes.loop_probe) against what this machine takes for a fixed piece of work.
"""

import array
import json
import random

import msgspec
import pytest

from service.api.auth import OpenAuthenticator
from service.api.grpc import InferenceServicer
from service.api.http import build_http_app
from service.api.services import ApiServices
from service.channel.messages import StepFrame, decode_step_frame, encode
from service.limits import Limits
from service.proto import inference_pb2 as pb
from tests.fakes.backend import MODEL_INFO
from tests.fakes.called import Called, UnconnectedCall
from tests.fakes.logprobs import pack
from tests.fakes.loop_probe import MAX_UNITS, held_units
from tests.fakes.text import make_bench
from workers.engine.logprobs import TokenLogprobs
from workers.engine.protocol import FinishReason, GenerateRequest, StepOutput
from workers.sampling.params import SamplingParams

LIMITS = Limits()
NUM_TOP = LIMITS.max_logprobs
NUM_SCORED = LIMITS.max_logprob_entries // (NUM_TOP + 1) - 64
NUM_IDS = 1 << 20
# At the ceiling they take seconds each; an eighth is dozens of what one turn of the loop may take.
scored = pytest.mark.parametrize(
    "num_scored", [NUM_SCORED // 8, pytest.param(NUM_SCORED, marks=pytest.mark.nightly)]
)

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(240)]


def _entry(rng):
    ids = rng.sample(range(3, 400), NUM_TOP)
    return TokenLogprobs(-1.25, 3, ids, [-0.5 * i for i in range(NUM_TOP)])


def _answers(request):
    """One token, or as many as were asked for, 256 a step; log probabilities as asked for."""
    rng = random.Random(3)
    num = request.sampling.max_tokens or 1
    pool = [_entry(rng) for _ in range(256)]
    outputs = []
    for start in range(0, num, 256):
        size = min(256, num - start)
        entries = pool[:size] if request.sampling.logprobs is not None else None
        outputs.append(StepOutput("", [5] * size, logprobs=entries))
    if request.sampling.prompt_logprobs is not None:
        entries = [pool[i % 256] for i in range(len(request.prompt_token_ids) - 1)]
        outputs[0].prompt_logprobs = pack(entries)
    outputs[-1].finish_reason = FinishReason.LENGTH
    return outputs


@pytest.fixture
def bench(tmp_path, monkeypatch):
    length = 2 * NUM_IDS
    info = msgspec.structs.replace(MODEL_INFO, max_context_len=length, max_request_len=length)
    made = make_bench(tmp_path, info=info)
    prepared = {}
    submit = made.backend.submit

    async def ready(request, context):
        made.backend.script = lambda request: list(prepared["outputs"])
        return await submit(request, context)

    async def decode(token_ids, flow, *, skip_special_tokens):
        return "x" * len(token_ids)  # what a tokenizer process does in its own time

    monkeypatch.setattr(made.backend, "submit", ready)
    monkeypatch.setattr(made.tokenizer, "decode", decode)
    return made, prepared


@pytest.fixture
def called(bench):
    services = ApiServices(
        models=bench[0].models,
        authenticator=OpenAuthenticator(),
        is_ready=lambda: True,
        version="0",
        started_s=0,
    )
    return Called(build_http_app(services))


def _prepare(bench, num_prompt, **sampling):
    """Outputs are made before anybody looks at the loop."""
    request = GenerateRequest("", [5] * num_prompt, SamplingParams(**sampling))
    bench[1]["outputs"] = _answers(request)


@scored
async def test_prompt_log_probabilities_of_a_long_prompt(bench, called, num_scored):
    body = {"prompt": [5] * num_scored, "prompt_logprobs": NUM_TOP, "max_tokens": 1}
    _prepare(bench, num_scored, prompt_logprobs=NUM_TOP, max_tokens=1)
    data = json.dumps(body).encode()
    (status, answer), held = await held_units(lambda: called.post("/v1/completions", data))
    assert status == 200
    entries = json.loads(answer)["choices"][0]["prompt_logprobs"]
    assert (len(entries), entries[0]) == (num_scored, None)
    assert len(entries[-1]) in (NUM_TOP, NUM_TOP + 1)
    assert held < MAX_UNITS


@scored
@pytest.mark.parametrize("is_stream", [False, True])
async def test_an_echo_with_log_probabilities(bench, called, is_stream, num_scored):
    body = {"prompt": [5] * num_scored, "logprobs": NUM_TOP, "echo": True, "max_tokens": 1}
    _prepare(bench, num_scored, prompt_logprobs=NUM_TOP, logprobs=NUM_TOP, max_tokens=1)
    data = json.dumps({**body, "stream": is_stream}).encode()
    (status, answer), held = await held_units(lambda: called.post("/v1/completions", data))
    assert status == 200
    chunks = [answer]
    if is_stream:
        chunks = [line[6:] for line in answer.splitlines() if line.startswith(b"data: {")]
    parts = [json.loads(chunk)["choices"][0] for chunk in chunks]
    assert sum(len(part["logprobs"]["tokens"]) for part in parts if part["logprobs"]) == (
        num_scored + 1
    )
    assert held < MAX_UNITS


@scored
async def test_log_probabilities_of_a_long_answer(bench, called, num_scored):
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": num_scored}
    _prepare(bench, 1, logprobs=NUM_TOP, max_tokens=num_scored)
    data = json.dumps({**body, "logprobs": True, "top_logprobs": NUM_TOP}).encode()
    (status, answer), held = await held_units(lambda: called.post("/v1/chat/completions", data))
    assert status == 200
    assert len(json.loads(answer)["choices"][0]["logprobs"]["content"]) == num_scored
    assert held < MAX_UNITS


@pytest.mark.parametrize("num_prompts", [1, 64])
async def test_a_prompt_of_the_most_token_ids(bench, called, num_prompts):
    rng = random.Random(2)
    ids = [rng.randrange(300, 400) for _ in range(NUM_IDS // num_prompts - 8)]
    _prepare(bench, 1, max_tokens=1)
    prompt = ids if num_prompts == 1 else [ids] * num_prompts
    data = json.dumps({"prompt": prompt, "max_tokens": 1}, separators=(",", ":")).encode()
    (status, answer), held = await held_units(lambda: called.post("/v1/completions", data))
    assert status == 200, answer
    assert bench[0].backend.requests[-1].prompt_token_ids == ids
    assert held < MAX_UNITS


async def test_the_most_tokens_to_be_text(bench, called):
    ids = [5] * (NUM_IDS - 8)
    data = json.dumps({"tokens": ids}, separators=(",", ":")).encode()
    (status, answer), held = await held_units(lambda: called.post("/detokenize", data))
    assert status == 200
    assert len(json.loads(answer)["prompt"]) == len(ids)
    assert held < MAX_UNITS


@pytest.mark.parametrize("wants_texts", [False, True])
async def test_tokens_of_the_longest_text(bench, called, monkeypatch, wants_texts):
    token_ids = array.array("I", [5]) * (LIMITS.max_prompt_bytes // 2)

    async def encode_text(job, flow):
        return token_ids

    monkeypatch.setattr(bench[0].tokenizer, "encode_text", encode_text)
    data = json.dumps({"prompt": "x", "return_token_strs": wants_texts}).encode()
    (status, answer), held = await held_units(lambda: called.post("/tokenize", data))
    assert status == 200
    assert len(json.loads(answer)["tokens"]) == len(token_ids)
    assert held < MAX_UNITS


async def test_the_longest_text_of_tokens(bench, called, monkeypatch):
    text = "naïve text " * (1 << 20)

    async def decode(token_ids, flow, *, skip_special_tokens):
        return text

    monkeypatch.setattr(bench[0].tokenizer, "decode", decode)
    (status, answer), held = await held_units(
        lambda: called.post("/detokenize", b'{"tokens": [5]}')
    )
    assert status == 200
    assert json.loads(answer)["prompt"] == text
    assert held < MAX_UNITS


async def _answered(method, request):
    async def ask():
        call = UnconnectedCall()
        await method(request, call)
        return call.answer

    return await held_units(ask)


@scored
async def test_grpc_answers_at_the_ceilings(bench, num_scored):
    servicer = InferenceServicer(bench[0].models)
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5] * num_scored))
    request.sampling.prompt_logprobs = NUM_TOP
    request.sampling.max_tokens = 1
    request.return_prompt_token_ids = True
    _prepare(bench, num_scored, prompt_logprobs=NUM_TOP, max_tokens=1)
    answer, held = await _answered(servicer.generate, request)
    (choice,) = pb.GenerateResponse.FromString(answer).choices
    assert (len(choice.prompt_logprobs), list(choice.token_ids)) == (num_scored, [5])
    assert len(choice.prompt_logprobs[-1].top) == NUM_TOP
    assert held < MAX_UNITS


async def test_grpc_prompts_and_tokens_at_the_ceilings(bench, monkeypatch):
    servicer = InferenceServicer(bench[0].models)
    token_ids = array.array("I", [5]) * NUM_IDS

    async def encode_text(job, flow):
        return token_ids

    async def decode(token_ids, flow, *, skip_special_tokens):
        return str(len(token_ids))

    monkeypatch.setattr(bench[0].tokenizer, "encode_text", encode_text)
    monkeypatch.setattr(bench[0].tokenizer, "decode", decode)
    _prepare(bench, 1, max_tokens=1)
    prompt = pb.GenerateRequest(token_ids=pb.TokenIds(ids=token_ids))
    prompt.sampling.max_tokens = 1
    _, held = await _answered(servicer.generate, prompt)
    assert held < MAX_UNITS
    request = pb.TokenizeRequest(text=pb.Text(text="x"), return_tokens=True)
    answer, held = await _answered(servicer.tokenize, request)
    found = pb.TokenizeResponse.FromString(answer)
    assert len(found.token_ids) == len(found.tokens) == NUM_IDS
    assert held < MAX_UNITS
    whole = pb.DetokenizeRequest(token_ids=token_ids)
    answer, held = await _answered(servicer.detokenize, whole)
    assert pb.DetokenizeResponse.FromString(answer).text == str(NUM_IDS)
    assert held < MAX_UNITS


async def test_a_frame_with_the_most_log_probabilities_is_read_at_once():
    """On the loop of the replica's channel, and on the ingress's."""
    entries = [_entry(random.Random(1))] * NUM_SCORED
    frame = StepFrame([StepOutput("r", [1], prompt_logprobs=pack(entries))], {})

    async def cross():
        body = encode(frame)
        return decode_step_frame(body)

    found, held = await held_units(cross)
    assert len(found.outputs[0].prompt_logprobs) == NUM_SCORED
    assert held < MAX_UNITS
