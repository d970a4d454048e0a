"""Parameters of the output that vLLM's clients send, over HTTP and gRPC alike."""

import dataclasses
import logging

import httpx
import pytest
import pytest_asyncio

from service.api.grpc import build_grpc_server
from service.api.http import build_http_app
from service.handler.defaults import SamplingDefaults
from service.proto import inference_pb2 as pb
from service.proto import inference_pb2_grpc as pb_grpc
from tests.fakes.backend import make_outputs
from tests.fakes.text import ANSWER
from workers.engine.logprobs import TokenLogprobs
from workers.engine.protocol import FinishReason, StepOutput

pytestmark = pytest.mark.asyncio
COMPLETION = {"prompt": "hi", "max_tokens": 50}
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
PATHS = {"/v1/completions": COMPLETION, "/v1/chat/completions": CHAT}


@pytest_asyncio.fixture
async def stub(services):
    server, port = build_grpc_server(services, "127.0.0.1:0")
    await server.start()
    channel = pb_grpc.grpc.aio.insecure_channel(f"127.0.0.1:{port}")
    yield pb_grpc.InferenceStub(channel)
    await channel.close()
    await server.stop(None)


async def posted(client, path, **extra):
    answer = await client.post(path, json={**PATHS[path], **extra})
    assert answer.status_code == 200, answer.text
    return answer.json()


def text_of(choice):
    return choice["text"] if "text" in choice else choice["message"]["content"]


def scored(likelihoods):
    """A script: choice i says one token 10 + i, of that log probability."""

    def script(request):
        index = int(request.request_id.rpartition("-")[2])
        output = StepOutput(request.request_id, [10 + index], FinishReason.LENGTH)
        if request.sampling.logprobs is not None:
            output.logprobs = [TokenLogprobs(likelihoods[index], 1, [], [])]
        return [output]

    return script


@pytest.mark.parametrize("path", PATHS)
async def test_the_likeliest_of_best_of_are_the_choices_best_first(client, bench, path):
    bench.backend.script = scored([-3.0, -1.0, -4.0, -2.0])
    answer = await posted(client, path, n=2, best_of=4)
    expected = [bench.handler.token_bytes([10 + i])[0].decode() for i in (1, 3)]
    assert [text_of(choice) for choice in answer["choices"]] == expected
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert all(choice["logprobs"] is None for choice in answer["choices"])
    assert answer["usage"]["completion_tokens"] == 4


async def test_best_of_works_for_each_prompt_and_keeps_log_probabilities_asked_for(client, bench):
    bench.backend.script = scored([-3.0, -1.0])
    extra = {"prompt": ["a", "b"], "best_of": 2, "logprobs": 0, "return_token_ids": True}
    answer = await posted(client, "/v1/completions", **extra)
    assert [choice["token_ids"] for choice in answer["choices"]] == [[11], [11]]
    assert [choice["logprobs"]["token_logprobs"] for choice in answer["choices"]] == [[-1.0]] * 2
    prompts = [choice["prompt_token_ids"] for choice in answer["choices"]]
    assert prompts == [bench.tokenizer.ids("a"), bench.tokenizer.ids("b")]


async def test_best_of_over_grpc(stub, bench):
    bench.backend.script = scored([-3.0, -1.0, -4.0])
    answer = await stub.Generate(pb.GenerateRequest(text=pb.Text(text="a"), n=1, best_of=3))
    (choice,) = answer.choices
    assert list(choice.token_ids) == [11]
    assert not choice.logprobs


@pytest.mark.parametrize(
    ("extra", "code", "param"),
    [
        ({"truncate_prompt_tokens": -2}, "invalid_request", "truncate_prompt_tokens"),
        ({"truncation_side": "top"}, "invalid_request", "truncation_side"),
        ({"stream_interval": 0}, "invalid_request", "stream_interval"),
        ({"speculative": 33}, "invalid_request", "speculative"),
        ({"speculative": "ngram"}, "invalid_request", "speculative"),
        (
            {"repetition_detection": {"max_pattern_size": 3}},
            "invalid_request",
            "repetition_detection",
        ),
    ],
)
@pytest.mark.parametrize("path", PATHS)
async def test_what_cannot_be_is_named(client, path, extra, code, param):
    answer = await client.post(path, json={**PATHS[path], **extra})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, code, param)


@pytest.mark.parametrize("path", PATHS)
async def test_whole_floats_are_integers(client, bench, path):
    await posted(client, path, max_tokens=5.0, top_k=3.0, seed=7.0, n=1.0, min_tokens=0.0)
    sampling = bench.backend.requests[0].sampling
    assert (sampling.max_tokens, sampling.top_k, sampling.seed) == (5, 3, 7)
    assert type(sampling.max_tokens) is int


async def test_tokens_may_be_told_by_their_ids(client, bench):
    ids = bench.tokenizer.ids(ANSWER)
    answer = await posted(client, "/v1/completions", logprobs=2, return_tokens_as_token_ids=True)
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["tokens"][: len(ids)] == [f"token_id:{token_id}" for token_id in ids]
    assert f"token_id:{ids[0]}" in logprobs["top_logprobs"][0]
    answer = await posted(
        client,
        "/v1/chat/completions",
        logprobs=True,
        top_logprobs=1,
        return_tokens_as_token_ids=True,
    )
    first = answer["choices"][0]["logprobs"]["content"][0]
    assert first["token"] == first["top_logprobs"][0]["token"] == f"token_id:{ids[0]}"
    assert bytes(first["bytes"]).decode() == first["token"]


@pytest.mark.parametrize(("side", "kept"), [(None, [4, 5]), ("left", [4, 5]), ("right", [1, 2])])
async def test_a_prompt_is_cut_on_the_side_that_is_said(client, stub, bench, side, kept):
    prompt = [1, 2, 3, 4, 5]
    await posted(
        client, "/v1/completions", prompt=prompt, truncate_prompt_tokens=2, truncation_side=side
    )
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt), truncate_prompt_tokens=2)
    if side is not None:
        request.truncation_side = side
    await stub.Generate(request)
    assert [sent.prompt_token_ids for sent in bench.backend.requests] == [kept, kept]


async def test_minus_one_keeps_what_leaves_room_for_the_output(client, stub, bench):
    prompt = [5 + i % 50 for i in range(600)]
    await posted(client, "/v1/completions", prompt=prompt, truncate_prompt_tokens=-1)
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt), truncate_prompt_tokens=-1)
    request.sampling.max_tokens = 50
    await stub.Generate(request)
    sent = [one.prompt_token_ids for one in bench.backend.requests]
    assert sent == [prompt[-(512 - 50) :]] * 2


async def test_a_choice_that_repeats_itself_ends(client, stub, bench):
    bench.backend.script = lambda request: make_outputs(request, [10, 11, 12, 11, 12, 11, 12, 13])
    detection = {"max_pattern_size": 2, "min_pattern_size": 2, "min_count": 3}
    answer = await posted(
        client, "/v1/completions", repetition_detection=detection, return_token_ids=True
    )
    (choice,) = answer["choices"]
    assert choice["token_ids"] == [10, 11, 12, 11, 12, 11, 12]
    assert (choice["finish_reason"], choice["stop_reason"]) == (
        "repetition",
        "repetition_detected",
    )
    assert bench.backend.num_live == 0
    request = pb.GenerateRequest(text=pb.Text(text="a"))
    request.sampling.repetition_detection.CopyFrom(pb.RepetitionDetection(**detection))
    answer = await stub.Generate(request)
    assert answer.choices[0].finish_reason == pb.FINISH_REASON_REPETITION
    assert answer.choices[0].stop_string == "repetition_detected"


async def test_repetition_ends_no_choice_before_its_least_length(client, bench):
    bench.backend.script = lambda request: make_outputs(request, [10] * 30)
    answer = await posted(
        client,
        "/v1/completions",
        repetition_detection={"max_pattern_size": 1, "min_count": 4},
        min_tokens=9,
    )
    assert answer["usage"]["completion_tokens"] == 9


@pytest.mark.parametrize(
    ("asked", "most"), [(None, None), (True, None), (False, 0), (0, 0), (3, 3), (3.0, 3)]
)
async def test_a_request_may_have_fewer_drafts_or_none(client, stub, bench, asked, most):
    turns = {"messages": CHAT["messages"], "max_tokens": 5}
    bodies = {"/v1/responses": {"input": "hi"}, "/v1/messages": turns, "/generate": {"text": "hi"}}
    for path, body in {**PATHS, **bodies}.items():
        answer = await client.post(path, json={**body, "speculative": asked})
        assert answer.status_code == 200, answer.text
    await stub.Generate(pb.GenerateRequest(text=pb.Text(text="a"), max_draft_tokens=most))
    assert [sent.max_draft_tokens for sent in bench.backend.requests] == [most] * 6


async def test_a_stream_sends_every_so_many_tokens(client, stub, bench):
    ids = [*bench.tokenizer.ids(ANSWER), 2]
    body = {**COMPLETION, "stream": True, "stream_interval": 4, "return_token_ids": True}
    lines = (await client.post("/v1/completions", json=body)).text.split("\n\n")
    chunks = [httpx.Response(200, text=line[6:]).json() for line in lines[:-2]]
    sizes = [len(chunk["choices"][0]["token_ids"]) for chunk in chunks]
    assert sizes[:-1] == [1, *[4] * (len(sizes) - 2)]
    assert sum(sizes) == len(ids)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == ANSWER
    request = pb.GenerateRequest(text=pb.Text(text="a"), stream_interval=4)
    sizes = [len(part.choice.token_ids) async for part in stub.GenerateStream(request)]
    assert sizes[:2] == [1, 4]


async def test_a_models_recommendations_are_for_what_is_left_open(client, stub, bench):
    bench.handler._defaults = SamplingDefaults({"temperature": 0.25, "top_p": 0.5})
    await posted(client, "/v1/completions", top_p=1.0)
    await posted(client, "/v1/chat/completions", temperature=0.0)
    message = {"max_tokens": 5, "messages": CHAT["messages"]}
    assert (await client.post("/v1/messages", json=message)).status_code == 200
    request = pb.GenerateRequest(text=pb.Text(text="a"))
    request.sampling.temperature = 1.0
    await stub.Generate(request)
    sent = [(one.sampling.temperature, one.sampling.top_p) for one in bench.backend.requests]
    assert sent == [(0.25, 1.0), (0.0, 0.5), (0.25, 0.5), (1.0, 0.5)]


async def test_rules_for_tokens_go_to_the_engine_by_both_protocols(client, stub, bench):
    word, spaced = bench.tokenizer.ids("hello"), bench.tokenizer.ids(" hello")
    rules = {"allowed_token_ids": [7, 5, 7], "logprob_token_ids": [9, 3, 9], "bad_words": ["hello"]}
    await posted(client, "/v1/completions", **rules)
    await posted(client, "/v1/chat/completions", **rules)
    request = pb.GenerateRequest(text=pb.Text(text="a"), sampling=pb.SamplingParams(**rules))
    await stub.Generate(request)
    expected = {tuple(word)} | ({tuple(spaced)} if len(spaced) == len(word) else set())
    for sent in bench.backend.requests:
        assert sent.sampling.allowed_token_ids == (7, 5)
        assert sent.sampling.logprob_token_ids == (9, 3)
        assert sent.sampling.logprobs == 0
        assert set(sent.sampling.bad_words) == expected
    assert len(bench.backend.requests) == 3


@pytest.mark.parametrize(
    ("rules", "code", "param"),
    [
        ({"allowed_token_ids": [420]}, "invalid_request", "allowed_token_ids"),
        ({"allowed_token_ids": [2], "min_tokens": 1}, "invalid_request", "allowed_token_ids"),
        ({"bad_words": [" "]}, "invalid_request", "bad_words"),
        ({"bad_words": ["x" * 40]}, "invalid_request", "bad_words"),
        ({"bad_words": ["x" * 300]}, "limit_exceeded", "bad_words"),
        ({"bad_words": ["x"] * 129}, "limit_exceeded", "bad_words"),
        ({"bad_words": ["x"], "guided_regex": "a"}, "invalid_request", "bad_words"),
        ({"logprob_token_ids": [5] * 3 + [420]}, "invalid_request", "logprob_token_ids"),
    ],
)
async def test_rules_that_cannot_be_followed_are_named(client, rules, code, param):
    answer = await client.post("/v1/completions", json={**COMPLETION, **rules})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, code, param)


async def test_beams_are_choices_over_both_protocols(client, stub, bench):
    extra = {"use_beam_search": True, "n": 2, "max_tokens": 3, "logprobs": 1}
    answer = await posted(client, "/v1/completions", **extra)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
    assert answer["usage"]["completion_tokens"] == 6
    sent = [one.sampling for one in bench.backend.requests]
    assert {(one.max_tokens, one.logprobs, one.temperature) for one in sent} == {(1, 4, 0.0)}
    assert len(sent) == 1 + 2 + 2
    request = pb.GenerateRequest(
        text=pb.Text(text="hi"), n=2, beam_search=pb.BeamSearch(use_beam_search=True)
    )
    request.sampling.max_tokens = 3
    found = await stub.Generate(request)
    assert [one.text for one in found.choices] == [one["text"] for one in answer["choices"]]
    assert bench.backend.num_live == 0


@pytest.mark.parametrize(
    "extra",
    [
        {"stream": True},
        {"temperature": 0, "presence_penalty": 1.0},
        {"guided_regex": "a"},
        {"best_of": 3},
        {"bad_words": ["a"]},
    ],
)
async def test_what_a_beam_search_cannot_have_is_refused(client, bench, extra):
    body = {**COMPLETION, "use_beam_search": True, **extra}
    error = (await client.post("/v1/completions", json=body)).json()["error"]
    assert (error["code"], error["param"]) == ("invalid_request", "use_beam_search")
    assert bench.backend.requests == []


@pytest.mark.parametrize("extra", [{"length_penalty": 2.0}, {"early_stopping": True}])
async def test_words_of_beam_searches_ask_for_one(client, extra):
    error = (await client.post("/v1/completions", json={**COMPLETION, **extra})).json()["error"]
    assert (error["code"], error["param"]) == ("invalid_request", next(iter(extra)))


@pytest.mark.parametrize(
    ("path", "extra", "code"),
    [
        ("/v1/completions", {}, "invalid_request"),
        ("/v1/completions", {"echo": True}, "invalid_request"),
        ("/v1/completions", {"prompt": [5]}, "invalid_request"),
        ("/v1/completions", {"parse_special_tokens": False}, "invalid_request"),
        ("/v1/chat/completions", {}, "unsupported_parameter"),
    ],
)
async def test_a_suffix_that_cannot_be_had_is_refused_by_its_name(client, bench, path, extra, code):
    answer = await client.post(path, json={**PATHS[path], "suffix": "x", **extra})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, code, "suffix")
    assert bench.backend.requests == []


async def test_a_suffix_reaches_the_tokenizer_by_both_protocols(client, stub, bench, monkeypatch):
    seen = []
    monkeypatch.setattr(
        bench.tokenizer.encoder, "encode_text", lambda job: seen.append(job.suffix) or [5]
    )
    await posted(client, "/v1/completions", prompt=["a", "b"], suffix="behind")
    await stub.Generate(pb.GenerateRequest(text=pb.Text(text="a", suffix="behind")))
    assert seen == ["behind"] * 3


@pytest.fixture
def lenient_client(services):
    app = build_http_app(dataclasses.replace(services, unknown_fields="ignore"))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://tessera")


async def test_unknown_fields_may_be_ignored_and_are_told_once(lenient_client, caplog):
    body = {**CHAT, "bogus": {"a": [1]}, "messages": [{**CHAT["messages"][0], "weight": 1}]}
    async with lenient_client as client:
        with caplog.at_level(logging.WARNING):
            for path in ("/v1/chat/completions", "/v1/chat/completions"):
                assert (await client.post(path, json=body)).status_code == 200
        told = [r.getMessage() for r in caplog.records if "unknown field" in r.getMessage()]
        assert sorted(name for line in told for name in ("bogus", "weight") if name in line) == [
            "bogus",
            "weight",
        ]
        refused = await client.post("/v1/chat/completions", json={**body, "temperature": "hot"})
        assert refused.json()["error"]["param"] == "temperature"
        unbuilt = await client.post("/v1/chat/completions", json={**body, "store": True})
        assert unbuilt.json()["error"]["code"] == "unsupported_parameter"


async def test_unknown_fields_of_large_bodies_are_ignored_too(lenient_client):
    body = {**COMPLETION, "bogus": "x" * (70 << 10)}
    async with lenient_client as client:
        assert (await client.post("/v1/completions", json=body)).status_code == 200
