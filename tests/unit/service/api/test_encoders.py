"""Embeddings, scores and rankings by models that are an encoder alone, with real engines behind the
handler, by HTTP, OpenAI's client and gRPC.
"""

import base64
import json

import grpc
import numpy as np
import openai
import pytest

from service.limits import Limits
from service.proto import inference_pb2 as pb
from service.proto.inference_pb2_grpc import InferenceStub
from tests.fakes.engine_script import EngineScript
from tests.fakes.text import InlineTokenizer, bench_over
from tests.fakes.tiny_encoders import MAX_POSITIONS, one_by_one, save_tiny_encoder
from tests.fakes.tokenizer_folders import make_word_piece_folder
from workers.config import EngineConfig

pytestmark = pytest.mark.asyncio
QUERY = "What is a fox?"
TEXTS = ["hello world", "the quick brown fox", "a", "jumping over the lazy dog, hello."]
LONG = "fox " * 100
CLS, SEP = 2, 3
NUM_LABELS = {"bert": 0, "reranker": 1, "classifier": 3}


class Encoder:
    """A model, its engine, and its tokenizer."""

    def __init__(self, folder, num_labels):
        kind = "classifier" if num_labels else "body"
        changes = {"num_labels": num_labels} if num_labels else {}
        make_word_piece_folder(folder)
        self.model = save_tiny_encoder("bert", folder, kind, **changes)
        self.script = EngineScript(EngineConfig(model=str(folder), num_cpu_threads=1))
        self.tokenizer = InlineTokenizer(folder)

    def unit_vectors(self, texts, dimensions=None):
        states = one_by_one(self.model, [self.tokenizer.ids(text) for text in texts])
        vectors = [one.mean(axis=0)[:dimensions] for one in states]
        return [one / np.linalg.norm(one) for one in vectors]

    def logits(self, pairs):
        """Of texts whose tokens are put together here: types 0 and 1, [SEP] behind each."""
        logits = []
        for first, second in pairs:
            head = self.tokenizer.ids(first)
            ids = head + self.tokenizer.ids(second)[1:]
            logits += one_by_one(self.model, [ids], second_start=len(head))
        return np.array(logits)


@pytest.fixture(scope="module")
def encoders(tmp_path_factory):
    return {name: Encoder(tmp_path_factory.mktemp(name), num) for name, num in NUM_LABELS.items()}


@pytest.fixture
def encoder(encoders, request):
    return encoders[getattr(request, "param", "bert")]


@pytest.fixture
def bench(encoder):
    script = encoder.script
    return bench_over(encoder.tokenizer, script, Limits(max_inputs=6), script.engine.info)


reranking = pytest.mark.parametrize("encoder", ["reranker"], indirect=True)
classifying = pytest.mark.parametrize("encoder", ["classifier"], indirect=True)


async def post(client, path, **body):
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def refused(client, path, **body):
    response = await client.post(path, json=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    return error["code"], error["param"]


def sigmoid(logits):
    return 1 / (1 + np.exp(-logits))


async def test_vectors_are_those_of_transformers_by_openais_client(openai_client, encoder, bench):
    name = bench.backend.info.name
    for form in ("float", "base64"):
        answer = await openai_client.embeddings.create(
            model=name, input=TEXTS, encoding_format=form, dimensions=16
        )
        found = [one.embedding for one in answer.data]
        if form == "base64":
            found = [np.frombuffer(base64.b64decode(one), "<f4") for one in found]
        np.testing.assert_allclose(found, encoder.unit_vectors(TEXTS, 16), atol=1e-5)
    num_tokens = sum(len(encoder.tokenizer.ids(text)) for text in TEXTS)
    assert answer.usage.prompt_tokens == num_tokens
    (whole,) = (await openai_client.embeddings.create(model=name, input=TEXTS[1])).data
    np.testing.assert_allclose(whole.embedding, encoder.unit_vectors(TEXTS[1:2])[0], atol=1e-5)


async def test_pooling_and_token_ids_are_the_same_vectors(client, encoder):
    ids = [encoder.tokenizer.ids(text) for text in TEXTS]
    assert ids[0][0] == CLS
    assert ids[0][-1] == SEP
    for body in ({"input": ids}, {"input": TEXTS, "task": "embed"}):
        data = (await post(client, "/pooling", **body))["data"]
        np.testing.assert_allclose(
            [one["data"] for one in data], encoder.unit_vectors(TEXTS), atol=1e-5
        )


async def test_scores_of_vectors_are_cosines(client, encoder):
    answer = await post(client, "/v1/score", queries=QUERY, documents=TEXTS)
    cosines = np.array(encoder.unit_vectors(TEXTS)) @ encoder.unit_vectors([QUERY])[0]
    np.testing.assert_allclose([one["score"] for one in answer["data"]], cosines, atol=1e-5)


@reranking
async def test_pairs_are_scored_by_what_reads_both_texts(client, encoder):
    expected = encoder.logits([(QUERY, text) for text in TEXTS])[:, 0]
    answer = await post(client, "/v1/score", text_1=QUERY, text_2=TEXTS)
    scores = [one["score"] for one in answer["data"]]
    np.testing.assert_allclose(scores, sigmoid(expected), atol=1e-5)
    num_tokens = sum(len(encoder.tokenizer.ids(text)) for text in TEXTS)
    num_query = len(encoder.tokenizer.ids(QUERY))
    assert answer["usage"]["prompt_tokens"] == num_tokens + len(TEXTS) * (num_query - 1)
    body = {"text_1": QUERY, "text_2": TEXTS, "use_activation": False}
    raw = [one["score"] for one in (await post(client, "/score", **body))["data"]]
    np.testing.assert_allclose(raw, expected, atol=1e-4)
    turned = await post(client, "/v1/score", text_1=TEXTS[:2], text_2=TEXTS[2:])
    pairs = encoder.logits(list(zip(TEXTS[:2], TEXTS[2:], strict=True)))[:, 0]
    found = [one["score"] for one in turned["data"]]
    np.testing.assert_allclose(found, sigmoid(pairs), atol=1e-5)


@reranking
@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
async def test_documents_are_ranked_by_their_scores(client, encoder, path):
    expected = sigmoid(encoder.logits([(QUERY, text) for text in TEXTS])[:, 0])
    results = (await post(client, path, query=QUERY, documents=TEXTS, top_n=3))["results"]
    assert [one["index"] for one in results] == list(np.argsort(-expected)[:3])
    assert [one["document"]["text"] for one in results] == [TEXTS[one["index"]] for one in results]
    scores = [one["relevance_score"] for one in results]
    np.testing.assert_allclose(scores, np.sort(expected)[::-1][:3], atol=1e-5)


@classifying
async def test_a_classifier_of_several_labels_gives_all_of_them(client, encoder):
    ids = [encoder.tokenizer.ids(text) for text in TEXTS]
    powers = np.exp(one_by_one(encoder.model, ids))
    data = (await post(client, "/pooling", input=TEXTS, task="classify"))["data"]
    found = [one["data"] for one in data]
    np.testing.assert_allclose(found, powers / powers.sum(axis=1, keepdims=True), atol=1e-5)
    asked = {"queries": QUERY, "documents": TEXTS}
    assert await refused(client, "/v1/score", **asked) == ("invalid_request", "model")
    assert await refused(client, "/rerank", query=QUERY, documents=TEXTS) == (
        "invalid_request",
        "model",
    )


@classifying
@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/embeddings", {"input": "a"}, "model"),
        ("/pooling", {"input": "a", "task": "embed"}, "model"),
        ("/pooling", {"input": "a", "dimensions": 1}, "dimensions"),
        ("/v1/completions", {"prompt": "a"}, "model"),
    ],
)
async def test_what_a_classifier_is_not_for_is_refused(client, bench, path, body, param):
    body = {"model": bench.backend.info.name, **body}
    assert await refused(client, path, **body) == ("invalid_request", param)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/completions", {"prompt": "a", "stream": True}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/responses", {"input": "a"}),
    ],
)
async def test_generations_are_refused_by_name(client, bench, path, body):
    body = {"model": bench.backend.info.name, **body}
    response = await client.post(path, json=body)
    assert response.status_code == 400
    assert "generates no text" in response.text


async def test_a_text_that_is_too_long_is_refused_or_cut_where_it_is_asked_for(client, encoder):
    too_long = "context_length_exceeded", "input"
    assert await refused(client, "/v1/embeddings", input=LONG) == too_long
    over = {"input": LONG, "truncate_prompt_tokens": MAX_POSITIONS + 1}
    assert await refused(client, "/v1/embeddings", **over) == too_long
    for cut, num_tokens in ((-1, MAX_POSITIONS), (8, 8)):
        body = {"input": [LONG, "hello"], "truncate_prompt_tokens": cut}
        answer = await post(client, "/v1/embeddings", **body)
        # [CLS] and [SEP] stay around what is kept.
        expected = encoder.unit_vectors(["fox " * (num_tokens - 2), "hello"])
        found = [one["embedding"] for one in answer["data"]]
        np.testing.assert_allclose(found, expected, atol=1e-5)
    for side, kept in ((None, "hello fox"), ("right", "hello fox"), ("left", "world.")):
        body = {"input": "hello fox over the world.", "truncate_prompt_tokens": 4}
        answer = await post(client, "/v1/embeddings", **body, truncation_side=side)
        found = answer["data"][0]["embedding"]
        np.testing.assert_allclose(found, encoder.unit_vectors([kept])[0], atol=1e-5)
    least = {"input": "hello", "truncate_prompt_tokens": 2}
    assert await refused(client, "/v1/embeddings", **least) == (
        "invalid_request",
        "truncate_prompt_tokens",
    )


async def test_token_ids_are_cut_at_their_end_as_texts_are(client, encoder):
    ids = encoder.tokenizer.ids(TEXTS[1])
    body = {"input": ids, "truncate_prompt_tokens": 3}
    vector = one_by_one(encoder.model, [ids[:3]])[0].mean(axis=0)
    (one,) = (await post(client, "/v1/embeddings", **body))["data"]
    np.testing.assert_allclose(one["embedding"], vector / np.linalg.norm(vector), atol=1e-5)


@reranking
async def test_pairs_that_are_too_long_are_refused_or_cut_of_the_longer_text(client, encoder):
    asked = {"queries": "hello", "documents": [LONG]}
    code, param = await refused(client, "/v1/score", **asked)
    assert (code, param) == ("context_length_exceeded", "documents")
    (one,) = (await post(client, "/v1/score", **asked, truncate_prompt_tokens=10))["data"]
    expected = sigmoid(encoder.logits([("hello", "fox " * 6)])[0, 0])
    assert one["score"] == pytest.approx(expected, abs=1e-5)


@reranking
async def test_grpc_scores_pairs(serve_grpc, encoder):
    stub = InferenceStub((await serve_grpc())())
    answer = await stub.Score(pb.ScoreRequest(queries=[QUERY], documents=TEXTS))
    expected = sigmoid(encoder.logits([(QUERY, text) for text in TEXTS])[:, 0])
    np.testing.assert_allclose(answer.scores, expected, atol=1e-5)


@reranking
async def test_more_pairs_than_inputs_are_refused(client):
    asked = {"query": QUERY, "documents": ["a"] * 7}
    assert await refused(client, "/rerank", **asked) == ("limit_exceeded", "documents")


@reranking
@pytest.mark.parametrize("cut", [None, -1])
async def test_a_text_counts_in_each_of_its_pairs(client, bench, cut):
    asked = {"query": "x" * (3 << 20), "documents": ["a"] * 6, "truncate_prompt_tokens": cut}
    assert await refused(client, "/rerank", **asked) == ("limit_exceeded", "documents")
    bench.handler.limits = Limits(max_paired_chars=12)
    fits = await post(client, "/v1/score", queries="hello", documents=["a", "b"])
    assert len(fits["data"]) == 2
    asked = {"queries": "hello", "documents": ["a", "fox"]}
    assert await refused(client, "/v1/score", **asked) == ("limit_exceeded", "documents")


async def test_grpc_has_the_vectors_and_the_refusals(serve_grpc, encoder):
    stub = InferenceStub((await serve_grpc())())
    inputs = [pb.EmbedInput(text=pb.Text(text=text)) for text in TEXTS]
    answer = await stub.Embed(pb.EmbedRequest(input=inputs))
    found = [one.values for one in answer.embeddings]
    np.testing.assert_allclose(found, encoder.unit_vectors(TEXTS), atol=1e-5)
    long = [pb.EmbedInput(text=pb.Text(text=LONG))]
    cut = await stub.Embed(pb.EmbedRequest(input=long, truncate_prompt_tokens=5))
    expected = encoder.unit_vectors(["fox " * 3])[0]
    np.testing.assert_allclose(cut.embeddings[0].values, expected, atol=1e-5)
    for call in (
        stub.Embed(pb.EmbedRequest(input=long)),
        stub.Generate(pb.GenerateRequest(text=pb.Text(text="a"))),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await call
        assert failed.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_words_come_back_from_their_pieces(client, bench):
    name = bench.backend.info.name
    text = "hello, the jumping fox!"
    tokens = (await post(client, "/tokenize", model=name, prompt=text))["tokens"]
    assert (await post(client, "/detokenize", model=name, tokens=tokens[1:-1]))["prompt"] == text


async def test_openais_errors_are_typed(openai_client, bench):
    with pytest.raises(openai.BadRequestError) as failed:
        await openai_client.embeddings.create(model=bench.backend.info.name, input=LONG)
    assert json.loads(failed.value.response.text)["error"]["code"] == "context_length_exceeded"
