"""Embeddings, by OpenAI's client and over gRPC, with a real engine behind the handler."""

import base64

import grpc.aio
import msgspec
import numpy as np
import openai
import pytest
import pytest_asyncio

from service.errors import ApiError, ApiErrorCode
from service.proto import inference_pb2 as pb
from service.proto import inference_pb2_grpc as pb_grpc
from service.security.quota import KeyLimits
from tests.fakes.backend import make_failure
from tests.fakes.engine_script import EngineScript, engine_bench
from tests.fakes.tiny_models import TinyModel, save_tiny_model
from workers.config import EngineConfig
from workers.errors import ErrorCode
from workers.pooling.params import Pooling, PoolingParams

pytestmark = pytest.mark.asyncio
MODEL = TinyModel("qwen3", {"head_dim": 16, "vocab_size": 420, "tie_word_embeddings": True})
SIZE = 64
TEXTS = ["hello world", "the quick brown fox", "a"]


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    folder = save_tiny_model(MODEL, tmp_path_factory.mktemp("qwen3"))
    script = EngineScript(EngineConfig(model=str(folder), page_size=4, num_pages=64))
    yield script
    script.close()


@pytest.fixture
def bench(tmp_path, script):
    return engine_bench(tmp_path, script)


@pytest.fixture
def name(script):
    return script.engine.info.name


@pytest.fixture
def truth(script, bench):
    """The engine's own vectors of texts, which its unit tests hold against Transformers."""

    def vectors(texts, **options):
        prompts = [bench.tokenizer.ids(text) for text in texts]
        return [
            result.embedding
            for result in script.engine.embed(prompts, PoolingParams(Pooling.LAST, **options))
        ]

    return vectors


def near(answer, expected):
    assert [one.index for one in answer.data] == list(range(len(expected)))
    assert {one.object for one in answer.data} == {"embedding"}
    for one, vector in zip(answer.data, expected, strict=True):
        np.testing.assert_allclose(one.embedding, vector, atol=1e-5, strict=False)
        assert len(one.embedding) == len(vector)


@pytest.mark.parametrize("encoding_format", ["float", "base64", None])
async def test_texts_become_vectors_in_their_order(
    openai_client, bench, truth, name, encoding_format
):
    extra = {} if encoding_format is None else {"encoding_format": encoding_format}
    answer = await openai_client.embeddings.create(model=name, input=TEXTS, **extra)
    if encoding_format == "base64":
        # The client decodes it only where it has asked for it by itself.
        for one in answer.data:
            one.embedding = np.frombuffer(base64.b64decode(one.embedding), "<f4")
    near(answer, truth(TEXTS))
    num_tokens = sum(len(bench.tokenizer.ids(text)) for text in TEXTS)
    assert (answer.object, answer.model) == ("list", name)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == num_tokens


async def test_pooling_gives_the_same_vectors_in_its_own_shape(client, truth, name):
    body = {"model": name, "input": TEXTS, "task": "embed", "dimensions": 7}
    answer = (await client.post("/pooling", json=body)).json()
    assert answer["id"].startswith("pool-")
    assert (answer["object"], answer["model"]) == ("list", name)
    assert [(one["index"], one["object"]) for one in answer["data"]] == [
        (index, "pooling") for index in range(len(TEXTS))
    ]
    expected = truth(TEXTS, dimensions=7)
    np.testing.assert_allclose([one["data"] for one in answer["data"]], expected, atol=1e-5)
    encoded = (await client.post("/pooling", json=body | {"encoding_format": "base64"})).json()
    values = [np.frombuffer(base64.b64decode(one["data"]), "<f4") for one in encoded["data"]]
    np.testing.assert_allclose(values, expected, atol=1e-5)
    assert encoded["usage"]["prompt_tokens"] == answer["usage"]["prompt_tokens"] > 0


@pytest.mark.parametrize(
    ("change", "code", "param"),
    [
        ({"task": "classify"}, "invalid_request", "task"),
        ({"messages": []}, "unknown_parameter", "messages"),
        ({"input": []}, "limit_exceeded", "input"),
    ],
)
async def test_what_pooling_is_not_for_is_refused_by_name(client, name, change, code, param):
    response = await client.post("/pooling", json={"model": name, "input": "a", **change})
    error = response.json()["error"]
    assert (error["code"], error["param"]) == (code, param)


async def test_a_text_a_prompt_of_tokens_and_several_are_one_way_to_say_it(
    openai_client, bench, truth, name
):
    ids = [bench.tokenizer.ids(text) for text in TEXTS]
    create = openai_client.embeddings.create
    near(await create(model=name, input=TEXTS[0], user="someone"), truth(TEXTS[:1]))
    near(await create(model=name, input=ids[0]), truth(TEXTS[:1]))
    near(await create(model=name, input=ids), truth(TEXTS))


async def test_dimensions_cut_and_normalize_can_be_left_out(openai_client, truth, name):
    create = openai_client.embeddings.create
    near(await create(model=name, input=TEXTS, dimensions=5), truth(TEXTS, dimensions=5))
    raw = await create(model=name, input=TEXTS, dimensions=SIZE, extra_body={"normalize": False})
    near(raw, truth(TEXTS, is_normalised=False))


async def test_an_input_is_cut_from_its_beginning_where_that_is_asked(
    openai_client, bench, truth, name
):
    tail = bench.tokenizer.ids(TEXTS[1])[-2:]
    answer = await openai_client.embeddings.create(
        model=name, input=TEXTS[1], extra_body={"truncate_prompt_tokens": 2}
    )
    assert answer.usage.prompt_tokens == 2
    near(answer, [(await _one(openai_client, name, tail))])


async def _one(openai_client, name, token_ids):
    answer = await openai_client.embeddings.create(model=name, input=token_ids)
    return answer.data[0].embedding


async def test_a_cached_prefix_is_told(client, name):
    body = {"model": name, "input": list(range(5, 45)), "cache_salt": "mine"}
    first, second = [(await client.post("/v1/embeddings", json=body)).json() for _ in range(2)]
    assert first["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert second["usage"]["prompt_tokens_details"] == {"cached_tokens": 36}
    np.testing.assert_allclose(
        first["data"][0]["embedding"], second["data"][0]["embedding"], atol=1e-5
    )
    # Of another tenant nothing is found.
    other = (await client.post("/v1/embeddings", json=body | {"cache_salt": "yours"})).json()
    assert other["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


async def test_a_prompt_may_be_as_long_as_the_context(client, bench, name):
    longest = bench.backend.info.max_request_len
    for num_tokens, status in ((longest, 200), (longest + 1, 400)):
        body = {"model": name, "input": [7] * num_tokens}
        response = await client.post("/v1/embeddings", json=body)
        assert response.status_code == status
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "input")
    assert "output" not in error["message"]


@pytest.mark.parametrize(
    ("change", "code", "param"),
    [
        ({"input": []}, "limit_exceeded", "input"),
        ({"input": [""]}, "invalid_request", "input"),
        ({"input": ""}, "invalid_request", "input"),
        ({"input": [[]]}, "invalid_request", "input"),
        ({"input": ["a"] * 2049}, "limit_exceeded", "input"),
        ({"input": [420]}, "invalid_request", "input"),
        ({"input": [-1]}, "invalid_request", "input"),
        ({"input": [True]}, "invalid_request", "input"),
        ({"input": [1.5]}, "invalid_request", "input"),
        ({"input": ["a", 5]}, "invalid_request", "input"),
        ({"input": [["a"]]}, "invalid_request", "input"),
        ({"input": None}, "invalid_request", "input"),
        ({"input": {"text": "a"}}, "invalid_request", "input"),
        ({"dimensions": 0}, "invalid_request", "dimensions"),
        ({"dimensions": SIZE + 1}, "invalid_request", "dimensions"),
        ({"dimensions": 1.5}, "invalid_request", "dimensions"),
        ({"encoding_format": "hex"}, "invalid_request", "encoding_format"),
        ({"embed_dtype": "float16"}, "invalid_request", "embed_dtype"),
        ({"truncate_prompt_tokens": 0}, "invalid_request", "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "invalid_request", "truncate_prompt_tokens"),
        ({"normalize": "yes"}, "invalid_request", "normalize"),
        ({"priority": 99}, "limit_exceeded", "priority"),
        ({"temperature": 1}, "unknown_parameter", "temperature"),
        ({"prompt": "a"}, "unknown_parameter", "prompt"),
        ({"model": "other"}, "model_not_found", "model"),
    ],
)
async def test_what_is_wrong_is_refused_by_name(client, bench, name, change, code, param):
    body = {"model": name, "input": "hello", **change}
    response = await client.post("/v1/embeddings", json=body)
    error = response.json()["error"]
    assert 400 <= response.status_code < 500
    assert (error["code"], error["param"]) == (code, param)
    assert not bench.backend.requests
    assert bench.metrics.named("rejected") == [code]


async def test_an_input_is_cut_to_what_the_model_takes(client, bench, name):
    longest = bench.backend.info.max_request_len
    ids = [5 + i % 400 for i in range(longest + 9)]
    body = {"model": name, "input": ids, "truncate_prompt_tokens": -1}
    answer = (await client.post("/v1/embeddings", json=body)).json()
    assert answer["usage"]["prompt_tokens"] == longest
    assert bench.backend.requests[-1].prompt_token_ids == ids[9:]


async def test_one_bad_input_among_many_leaves_nothing_under_way(client, bench, name):
    response = await client.post("/v1/embeddings", json={"model": name, "input": ["a", "", "b"]})
    assert response.status_code == 400
    assert bench.backend.num_live == 0


async def test_it_is_counted_as_prompt_tokens_and_no_output(client, bench, name):
    await client.post("/v1/embeddings", json={"model": name, "input": TEXTS[:2]})
    lens = [len(bench.tokenizer.ids(text)) for text in TEXTS[:2]]
    metrics = bench.metrics
    assert metrics.named("accepted") == [(sum(lens), 2)]
    assert not metrics.named("first_token")
    assert not metrics.named("tokens")
    assert len(metrics.named("vector")) == 2
    finished = metrics.named("finished")
    assert [reason for reason, _ in finished] == ["stop", "stop"]
    assert sorted(numbers["num_prompt_tokens"] for _, numbers in finished) == sorted(lens)
    assert {numbers["num_output_tokens"] for _, numbers in finished} == {0}
    (context,) = {id(one): one for one in bench.backend.contexts}.values()
    record = context.record
    assert (record.num_prompt_tokens, record.num_output_tokens) == (sum(lens), 0)
    assert record.first_output_s is not None


async def test_a_model_without_embeddings_says_so(client, bench, name):
    bench.backend.info = msgspec.structs.replace(bench.backend.info, embedding=None)
    response = await client.post("/v1/embeddings", json={"model": name, "input": "a"})
    error = response.json()["error"]
    assert response.status_code == 400
    assert (error["code"], error["param"]) == ("invalid_request", "model")
    assert "no embeddings" in error["message"]


async def test_prompt_tokens_are_charged_to_the_key_and_nothing_else(
    client, bench, name, caller_quota
):
    caller_quota(KeyLimits(tokens_per_minute=10))
    for num_tokens, status in ((6, 200), (4, 200), (1, 429)):
        body = {"model": name, "input": [7] * num_tokens}
        assert (await client.post("/v1/embeddings", json=body)).status_code == status


@pytest.mark.parametrize(
    ("code", "status"), [(ErrorCode.INTERNAL, 500), (ErrorCode.OUT_OF_MEMORY, 503)]
)
async def test_a_failure_of_one_input_fails_the_request_and_ends_the_others(
    openai_client, bench, name, code, status
):
    play = bench.backend.script

    def failing(request):
        if len(bench.backend.requests) == 2:
            return [make_failure(request, code, "lost")]
        return play(request)

    bench.backend.script = failing
    with pytest.raises(openai.APIStatusError) as failed:
        await openai_client.embeddings.create(model=name, input=TEXTS)
    assert failed.value.status_code == status
    assert bench.backend.num_live == 0


async def test_a_replica_that_refuses_is_told_as_it_is(client, bench, name):
    bench.backend.refusal = ApiError(ApiErrorCode.OVERLOADED, "full")
    response = await client.post("/v1/embeddings", json={"model": name, "input": "a"})
    assert response.status_code == 429
    assert response.headers["retry-after"]


@pytest_asyncio.fixture
async def stub(serve_grpc):
    connect = await serve_grpc()
    return pb_grpc.InferenceStub(connect())


def inputs_of(*texts):
    return [pb.EmbedInput(text=pb.Text(text=text)) for text in texts]


async def test_grpc_gives_the_same_vectors(stub, bench, truth, name):
    ids = bench.tokenizer.ids(TEXTS[2])
    several = [*inputs_of(*TEXTS[:2]), pb.EmbedInput(token_ids=pb.TokenIds(ids=ids))]
    answer = await stub.Embed(pb.EmbedRequest(model=name, input=several, request_id="mine"))
    assert (answer.id, answer.model) == ("mine", name)
    assert [one.index for one in answer.embeddings] == [0, 1, 2]
    for one, vector in zip(answer.embeddings, truth(TEXTS), strict=True):
        np.testing.assert_allclose(one.values, vector, atol=1e-5)
    num_tokens = sum(len(bench.tokenizer.ids(text)) for text in TEXTS)
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (num_tokens, 0)
    assert usage.total_tokens == num_tokens


async def test_grpc_has_the_same_options(stub, bench, truth):
    cut = await stub.Embed(pb.EmbedRequest(input=inputs_of(TEXTS[0]), dimensions=5))
    np.testing.assert_allclose(
        cut.embeddings[0].values, truth(TEXTS[:1], dimensions=5)[0], atol=1e-5
    )
    raw = await stub.Embed(pb.EmbedRequest(input=inputs_of(TEXTS[0]), normalize=False))
    np.testing.assert_allclose(
        raw.embeddings[0].values, truth(TEXTS[:1], is_normalised=False)[0], atol=1e-5
    )
    request = pb.EmbedRequest(
        input=inputs_of(TEXTS[1]), truncate_prompt_tokens=2, cache_salt="x", priority=0
    )
    assert (await stub.Embed(request)).usage.prompt_tokens == 2
    all_that_fit = pb.EmbedRequest(input=inputs_of(TEXTS[1]), truncate_prompt_tokens=-1)
    num_tokens = len(bench.tokenizer.ids(TEXTS[1]))
    assert (await stub.Embed(all_that_fit)).usage.prompt_tokens == num_tokens
    await stub.Embed(request)
    sent = bench.backend.requests[-1]
    assert sent.prompt_token_ids == bench.tokenizer.ids(TEXTS[1])[-2:]
    assert sent.cache_salt == "x"
    for side, kept in (("left", slice(-2, None)), ("right", slice(2))):
        request.truncation_side = side
        await stub.Embed(request)
        sent = bench.backend.requests[-1]
        assert sent.prompt_token_ids == bench.tokenizer.ids(TEXTS[1])[kept]


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"input": []}, "limit_exceeded", "input"),
        ({"input": inputs_of("")}, "invalid_request", "input"),
        ({"input": [pb.EmbedInput()]}, "invalid_request", "input"),
        ({"input": inputs_of(*["a"] * 2049)}, "limit_exceeded", "input"),
        ({"dimensions": 0}, "invalid_request", "dimensions"),
        ({"dimensions": SIZE + 1}, "invalid_request", "dimensions"),
        ({"truncate_prompt_tokens": 0}, "invalid_request", "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "invalid_request", "truncate_prompt_tokens"),
        ({"truncation_side": "top"}, "invalid_request", "truncation_side"),
        ({"truncation_side": ""}, "invalid_request", "truncation_side"),
        ({"priority": 99}, "limit_exceeded", "priority"),
        ({"model": "other"}, "model_not_found", "model"),
    ],
)
async def test_grpc_refuses_by_name(stub, bench, fields, code, param):
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stub.Embed(pb.EmbedRequest(**{"input": inputs_of("hello"), **fields}))
    trailers = dict(refused.value.trailing_metadata())
    assert (trailers["tessera-error-code"], trailers["tessera-error-param"]) == (code, param)
    assert not bench.backend.requests
