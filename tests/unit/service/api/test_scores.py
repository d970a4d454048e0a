"""Scores and rankings of texts by a model that gives vectors, with a real engine behind it."""

import grpc.aio
import numpy as np
import pytest
import pytest_asyncio

from service.limits import Limits
from service.proto import inference_pb2 as pb
from service.proto import inference_pb2_grpc as pb_grpc
from tests.fakes.engine_script import EngineScript, engine_bench
from tests.fakes.tiny_models import TinyModel, save_tiny_model
from workers.config import EngineConfig
from workers.pooling.params import Pooling, PoolingParams

pytestmark = pytest.mark.asyncio
MODEL = TinyModel("qwen3", {"head_dim": 16, "vocab_size": 420, "tie_word_embeddings": True})
QUERY = "what is a fox?"
DOCUMENTS = ["hello world", "the quick brown fox", "a", "jumps over the lazy dog"]


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
def cosines(script, bench):
    """Of a text with each of the others, by numpy from the engine's own unit vectors."""

    def scores(one, others):
        prompts = [bench.tokenizer.ids(text) for text in (one, *others)]
        results = script.engine.embed(prompts, PoolingParams(Pooling.LAST))
        vectors = np.array([result.embedding for result in results])
        return vectors[1:] @ vectors[0]

    return scores


def num_tokens(bench, texts):
    return sum(len(bench.tokenizer.ids(text)) for text in texts)


async def scored(client, path="/v1/score", **body):
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize(
    ("first", "second"),
    [("queries", "documents"), ("queries", "items"), ("text_1", "text_2"), ("data_1", "data_2")],
)
async def test_one_text_is_scored_with_each_of_the_others(client, bench, cosines, first, second):
    answer = await scored(client, **{first: QUERY, second: DOCUMENTS})
    assert (answer["object"], answer["model"]) == ("list", bench.backend.info.name)
    assert answer["id"].startswith("score-")
    assert [(one["index"], one["object"]) for one in answer["data"]] == [
        (i, "score") for i in range(4)
    ]
    scores = [one["score"] for one in answer["data"]]
    np.testing.assert_allclose(scores, cosines(QUERY, DOCUMENTS), atol=1e-5)
    total = num_tokens(bench, [QUERY, *DOCUMENTS])
    assert answer["usage"] == {"prompt_tokens": total, "total_tokens": total}


async def test_as_many_texts_are_scored_in_pairs_and_one_may_stand_on_either_side(client, cosines):
    pairs = (await scored(client, text_1=DOCUMENTS[:2], text_2=DOCUMENTS[2:]))["data"]
    expected = [cosines(DOCUMENTS[i], [DOCUMENTS[2 + i]])[0] for i in range(2)]
    np.testing.assert_allclose([one["score"] for one in pairs], expected, atol=1e-5)
    turned = (await scored(client, path="/score", text_1=DOCUMENTS, text_2=[QUERY]))["data"]
    expected = cosines(QUERY, DOCUMENTS)
    np.testing.assert_allclose([one["score"] for one in turned], expected, atol=1e-5)


async def test_a_text_is_like_itself(client):
    (one,) = (await scored(client, text_1=QUERY, text_2=QUERY))["data"]
    assert one["score"] <= 1.0
    assert one["score"] == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
@pytest.mark.parametrize("is_of_model", [False, True])
async def test_documents_are_ranked_the_best_first(client, bench, cosines, path, is_of_model):
    path = f"/models/{bench.backend.info.name}{path}" if is_of_model else path
    answer = await scored(client, path=path, query=QUERY, documents=DOCUMENTS)
    scores = cosines(QUERY, DOCUMENTS)
    order = [one["index"] for one in answer["results"]]
    assert order == list(np.argsort(-scores))
    for one in answer["results"]:
        assert one["relevance_score"] == pytest.approx(scores[one["index"]], abs=1e-5)
        assert one["document"] == {"text": DOCUMENTS[one["index"]]}
    assert answer["usage"]["total_tokens"] == num_tokens(bench, [QUERY, *DOCUMENTS])


async def test_a_ranking_may_be_cut_and_come_without_documents(client, cosines):
    best = int(np.argmax(cosines(QUERY, DOCUMENTS)))
    objects = [{"text": text} for text in DOCUMENTS]
    body = {"query": QUERY, "documents": objects, "top_n": 1, "return_documents": False}
    (one,) = (await scored(client, path="/v1/rerank", **body))["results"]
    assert set(one) == {"index", "relevance_score"}
    assert one["index"] == best
    for top_n in (0, 9, None):
        every = await scored(client, path="/rerank", **{**body, "top_n": top_n})
        assert len(every["results"]) == 4


@pytest.mark.parametrize("side", ["left", "right"])
async def test_texts_are_cut_on_the_side_that_is_asked(client, bench, side):
    body = {"text_1": QUERY, "text_2": DOCUMENTS[1], "truncate_prompt_tokens": 3}
    answer = await scored(client, **body, truncation_side=side)
    assert answer["usage"]["prompt_tokens"] == 6
    ids = bench.tokenizer.ids(QUERY)
    kept = ids[:3] if side == "right" else ids[-3:]
    assert kept in [request.prompt_token_ids for request in bench.backend.requests]


PAIR = {"text_1": "a", "text_2": "b"}


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({"text_1": "a"}, "invalid_request", "text_1"),
        ({}, "invalid_request", "queries"),
        ({"text_1": "a", "documents": "b"}, "invalid_request", "documents"),
        ({**PAIR, "queries": "a"}, "invalid_request", "queries"),
        ({"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "invalid_request", "text_2"),
        ({"text_1": "a", "text_2": []}, "invalid_request", "text_2"),
        ({"text_1": [], "text_2": []}, "invalid_request", "text_2"),
        ({"queries": "a", "documents": ["b", ""]}, "invalid_request", "documents"),
        ({"text_1": 5, "text_2": "a"}, "invalid_request", "text_1"),
        ({"text_1": [5], "text_2": "a"}, "invalid_request", "text_1"),
        ({"text_1": "a", "text_2": ["a"] * 2048}, "limit_exceeded", "text_2"),
        ({**PAIR, "truncation_side": "both"}, "invalid_request", "truncation_side"),
        ({**PAIR, "model": "other"}, "model_not_found", "model"),
        ({**PAIR, "dimensions": 2}, "unknown_parameter", "dimensions"),
    ],
)
async def test_what_cannot_be_scored_is_refused_by_name(client, bench, body, code, param):
    await refused(client, bench, "/v1/score", body, code, param)


RANKED = {"query": "a", "documents": ["b", "c"]}


@pytest.mark.parametrize(
    ("change", "code", "param"),
    [
        ({"query": None}, "invalid_request", "query"),
        ({"query": ["a"]}, "invalid_request", "query"),
        ({"documents": []}, "invalid_request", "documents"),
        ({"documents": "b"}, "invalid_request", "documents"),
        ({"documents": [{"title": "b"}]}, "invalid_request", "documents"),
        ({"documents": [{"text": 5}]}, "invalid_request", "documents"),
        ({"documents": ["b", ""]}, "invalid_request", "documents"),
        ({"top_n": -1}, "invalid_request", "top_n"),
        ({"max_tokens_per_doc": 5}, "unknown_parameter", "max_tokens_per_doc"),
        ({"priority": 99}, "limit_exceeded", "priority"),
    ],
)
async def test_what_cannot_be_ranked_is_refused_by_name(client, bench, change, code, param):
    await refused(client, bench, "/v2/rerank", {**RANKED, **change}, code, param)


async def refused(client, bench, path, body, code, param):
    response = await client.post(path, json=body)
    error = response.json()["error"]
    assert 400 <= response.status_code < 500
    assert (error["code"], error["param"]) == (code, param)
    assert not bench.backend.requests
    assert bench.metrics.named("rejected") == [code]


async def test_many_documents_take_turns(client, bench, cosines):
    bench.handler.limits = Limits(max_inputs_at_once=4)
    documents = [f"number {i}" for i in range(70)]
    answer = await scored(client, path="/rerank", query=QUERY, documents=documents)
    expected = cosines(QUERY, documents)
    found = {one["index"]: one["relevance_score"] for one in answer["results"]}
    np.testing.assert_allclose([found[i] for i in range(70)], expected, atol=1e-5)


@pytest_asyncio.fixture
async def stub(serve_grpc):
    connect = await serve_grpc()
    return pb_grpc.InferenceStub(connect())


async def test_grpc_gives_the_same_scores(stub, client, bench):
    name = bench.backend.info.name
    for queries in ([QUERY], DOCUMENTS[::-1]):
        asked = {"model": name, "queries": queries, "documents": DOCUMENTS, "request_id": "mine"}
        answer = await stub.Score(pb.ScoreRequest(**asked))
        http = await scored(client, **asked)
        np.testing.assert_allclose(answer.scores, [one["score"] for one in http["data"]], atol=1e-6)
        assert (answer.id, answer.model) == ("mine", name)
        assert 0 <= http["created"] - answer.created < 600
        assert answer.usage.prompt_tokens == http["usage"]["prompt_tokens"]
    sides = {"left": slice(-3, None), "right": slice(3)}
    for side, kept in sides.items():
        cut = {"truncate_prompt_tokens": 3, "truncation_side": side, "cache_salt": "x"}
        await stub.Score(pb.ScoreRequest(queries=[QUERY], documents=["a"], **cut))
        sent = next(one for one in bench.backend.requests[-2:] if len(one.prompt_token_ids) == 3)
        assert sent.prompt_token_ids == bench.tokenizer.ids(QUERY)[kept]
        assert sent.cache_salt == "x"


@pytest.mark.parametrize(
    ("change", "code", "param"),
    [
        ({"queries": []}, "invalid_request", "documents"),
        ({"queries": ["a", "b", "c"]}, "invalid_request", "documents"),
        ({"documents": ["b", ""]}, "invalid_request", "documents"),
        ({"documents": ["a"] * 2048}, "limit_exceeded", "documents"),
        ({"truncate_prompt_tokens": -2}, "invalid_request", "truncate_prompt_tokens"),
        ({"truncation_side": "both"}, "invalid_request", "truncation_side"),
        ({"priority": 99}, "limit_exceeded", "priority"),
        ({"model": "other"}, "model_not_found", "model"),
    ],
)
async def test_grpc_refuses_by_name(stub, bench, change, code, param):
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stub.Score(pb.ScoreRequest(**{"queries": ["a"], "documents": ["b", "c"], **change}))
    trailers = dict(refused.value.trailing_metadata())
    assert (trailers["tessera-error-code"], trailers["tessera-error-param"]) == (code, param)
    assert not bench.backend.requests
