"""Embeddings on a real Ray, two ranks and several models, by OpenAI's client and gRPC, beside
generations: of decoders, and of an encoder and a cross-encoder.
"""

from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import grpc
import httpx
import numpy as np
import openai
import pytest
import torch
from transformers import AutoModel, AutoModelForSequenceClassification

from service.proto import inference_pb2 as pb
from service.proto.inference_pb2_grpc import InferenceStub
from tests.browser import open_browser
from tests.fakes.tiny_encoders import one_by_one, save_tiny_encoder
from tests.fakes.tiny_models import TinyModel, eager_reference, save_tiny_model
from tests.fakes.tokenizer_folders import make_byte_level_folder, make_word_piece_folder
from tests.integration.services import running_service, settled, wait_until
from tests.page_checks import check_page
from tests.programs import needed, skip_without
from workers.loading.pooling_config import POOLING_FILE

APP, PORT = "embeddings", 18390
TINY = TinyModel("qwen3", {"head_dim": 16, "vocab_size": 420, "tie_word_embeddings": True})
ENGINE = {"kv_cache_bytes": 16 << 20, "num_cpu_threads": 1, "page_size": 4, "max_step_tokens": 16}
TEXTS = ["hello world", "the quick brown fox jumps over the lazy dog", "a", "hello there, hello"]
MEAN = '{"pooling_mode_mean_tokens": true, "pooling_mode_lasttoken": false}'


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folders = {}
    for name in ("last", "mean"):
        folder = make_byte_level_folder(tmp_path_factory.mktemp(name), chat_template=None)
        folders[name] = save_tiny_model(TINY, folder)
    path = folders["mean"] / POOLING_FILE
    path.parent.mkdir()
    path.write_text(MEAN, encoding="utf-8")
    for name, kind in (("encoder", "body"), ("reranker", "classifier")):
        folders[name] = make_word_piece_folder(tmp_path_factory.mktemp(name))
        save_tiny_encoder("bert", folders[name], kind, num_labels=1)
    return folders


@pytest.fixture(scope="module")
def service(ray_session, folders):
    models = {
        "last": {"engine": {**ENGINE, "model": str(folders["last"]), "tp_size": 2}},
        "mean": {"engine": {**ENGINE, "model": str(folders["mean"])}},
        "encoder": {"engine": {"num_cpu_threads": 1, "model": str(folders["encoder"])}},
        "reranker": {"engine": {"num_cpu_threads": 1, "model": str(folders["reranker"])}},
    }
    with running_service(APP, PORT, models=models) as running:
        yield running


@pytest.fixture(scope="module")
def truth(service, folders):
    """Of both models, which have the same weights, by Transformers."""
    url = f"{service.url}/models/last/tokenize"
    prompts = [httpx.post(url, json={"prompt": text}).json()["tokens"] for text in TEXTS]
    reference = eager_reference(folders["last"])
    with torch.no_grad():
        states = [reference.model(torch.tensor([p])).last_hidden_state[0] for p in prompts]
    pooled = {"last": [one[-1] for one in states], "mean": [one.mean(0) for one in states]}
    return {name: [(v / v.norm()).numpy() for v in vectors] for name, vectors in pooled.items()}


def metric(service, name, model):
    """The sum of a metric's series of a model; None where there is none."""
    text = httpx.get(f"http://127.0.0.1:{PORT + 2}/metrics").text
    lines = [line for line in text.splitlines() if line.startswith((name + "{", name + " "))]
    values = [float(one.rsplit(" ", 1)[1]) for one in lines if f'model="{model}"' in one]
    return sum(values) if values else None


def vectors_of(service, model, **more):
    answer = service.openai().embeddings.create(model=model, input=TEXTS, **more)
    return [one.embedding for one in answer.data]


@pytest.mark.parametrize("model", ["last", "mean"])
def test_vectors_are_those_of_transformers_whoever_generates_beside(service, truth, model):
    def generate(index):
        service.openai().completions.create(model=model, prompt=TEXTS[index % 4], max_tokens=30)

    with ThreadPoolExecutor(12) as pool:
        generations = [pool.submit(generate, index) for index in range(8)]
        answers = list(pool.map(lambda _: vectors_of(service, model), range(6)))
        for one in generations:
            one.result()
    for answer in answers:
        np.testing.assert_allclose(answer, truth[model], atol=1e-4)


def test_scores_and_rankings_are_of_the_same_vectors(service, truth):
    cosines = np.array(truth["mean"][1:]) @ truth["mean"][0]
    pair = {"model": "mean", "queries": TEXTS[0], "documents": TEXTS[1:]}
    scores = httpx.post(f"{service.url}/v1/score", json=pair).json()["data"]
    np.testing.assert_allclose([one["score"] for one in scores], cosines, atol=1e-4)
    asked = {"query": TEXTS[0], "documents": TEXTS[1:], "top_n": 2}
    ranked = httpx.post(f"{service.url}/models/mean/v2/rerank", json=asked).json()["results"]
    assert [one["index"] for one in ranked] == list(np.argsort(-cosines)[:2])


def tokens_of(service, model, text):
    url = f"{service.url}/models/{model}/tokenize"
    return httpx.post(url, json={"prompt": text}).json()["tokens"]


def test_an_encoder_gives_vectors_by_both_protocols_and_refuses_to_generate(service, folders):
    reference = AutoModel.from_pretrained(folders["encoder"]).eval()
    ids = [tokens_of(service, "encoder", text) for text in TEXTS]
    expected = [states.mean(axis=0) for states in one_by_one(reference, ids)]
    expected = [one / np.linalg.norm(one) for one in expected]
    many = service.openai().embeddings.create(model="encoder", input=TEXTS * 50).data
    np.testing.assert_allclose([one.embedding for one in many], expected * 50, atol=1e-5)
    with grpc.insecure_channel(f"127.0.0.1:{PORT + 1}") as channel:
        inputs = [pb.EmbedInput(text=pb.Text(text=text)) for text in TEXTS]
        answer = InferenceStub(channel).Embed(pb.EmbedRequest(model="encoder", input=inputs))
    np.testing.assert_allclose([one.values for one in answer.embeddings], expected, atol=1e-5)
    with pytest.raises(openai.BadRequestError, match="generates no text"):
        service.openai().completions.create(model="encoder", prompt="a")
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        service.openai().embeddings.create(model="encoder", input="fox " * 100)


def test_a_cross_encoder_scores_pairs(service, folders):
    model = AutoModelForSequenceClassification.from_pretrained(folders["reranker"]).eval()
    head = tokens_of(service, "reranker", TEXTS[0])
    pairs = [head + tokens_of(service, "reranker", text)[1:] for text in TEXTS[1:]]
    logits = np.array(one_by_one(model, pairs, second_start=len(head)))[:, 0]
    scores = 1 / (1 + np.exp(-logits))
    asked = {"model": "reranker", "query": TEXTS[0], "documents": TEXTS[1:]}
    ranked = httpx.post(f"{service.url}/v1/rerank", json=asked).json()["results"]
    found = {one["index"]: one["relevance_score"] for one in ranked}
    np.testing.assert_allclose([found[i] for i in range(3)], scores, atol=1e-5)
    assert [one["index"] for one in ranked] == list(np.argsort(-scores))


def test_a_client_that_leaves_takes_its_texts_along(service):
    body = {"model": "encoder", "input": ["fox " * 60] * 2000}
    patience = httpx.Timeout(30.0, read=0.2)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{service.url}/v1/embeddings", json=body, timeout=patience)
    # Nothing of it stands before others: they are answered, and the load goes back to nothing.
    assert len(vectors_of(service, "encoder")) == len(TEXTS)
    wait_until(lambda: metric(service, "tessera_waiting_requests", "encoder") == 0)


def test_metrics_of_encoders_are_numbers(service):
    def told():
        return metric(service, "tessera_steps_total", "encoder") or 0

    vectors_of(service, "encoder")
    wait_until(lambda: told() > 0)
    text = httpx.get(f"http://127.0.0.1:{PORT + 2}/metrics").text
    mine = [line for line in text.splitlines() if 'model="encoder"' in line]
    assert mine
    assert not [line for line in mine if line.endswith("NaN")]
    assert metric(service, "tessera_kv_pages", "encoder") == 0


def test_what_is_wrong_is_a_typed_error_of_the_client(service):
    create = service.openai().embeddings.create
    with pytest.raises(openai.NotFoundError):
        create(model="other", input="a")
    with pytest.raises(openai.BadRequestError) as refused:
        create(model="last", input="a", dimensions=65)
    assert refused.value.param == "dimensions"
    # What the engine could not take was refused before it: both models still answer.
    for model in ("last", "mean"):
        assert len(vectors_of(service, model, dimensions=3)[0]) == 3


def test_embeddings_are_counted_and_stream_no_tokens(service):
    def value(name):
        return metric(service, name, "mean") or 0

    names = ("tessera_requests_accepted_total", "tessera_streamed_tokens_total")
    finished = "tessera_requests_finished_total"
    *before, ended = settled(lambda: [value(name) for name in (*names, finished)])
    vectors_of(service, "mean")
    wait_until(lambda: value(finished) == ended + len(TEXTS))
    assert [value(name) for name in names] == [before[0] + 1, before[1]]


@asynccontextmanager
async def page_of(service, folder, model):
    """The page with this model chosen as a person does; checked when the test has ended."""
    async with open_browser(needed("chromium"), folder) as page:
        await page.resize(1280, 900)
        await page.open(f"{service.url}/")
        await page.until("document.querySelector('#pulse').dataset.state === 'live'")
        await page.read("document.getElementById('model').focus()")
        await page.type(model)
        await page.until(f"document.getElementById('model').value === '{model}'")
        yield page
        await check_page(page, service.url)


ROWS = "[...document.querySelectorAll('.ranking li')].map(row => row.innerText.split('\\n'))"


def shown_rows(rows):
    """Texts of a ranking and their numbers."""
    return [row[0] for row in rows], [float(row[-1]) for row in rows]


async def fill_in(page, text, others):
    for field, content in (("text", text), ("others", "\n".join(others))):
        await page.click(f"document.getElementById('{field}')")
        await page.read(f"document.getElementById('{field}').value = {content!r}")
    await page.click("document.getElementById('texts-send')")


@pytest.mark.asyncio
@skip_without("chromium")
async def test_the_page_of_an_encoder_shows_a_vector_and_what_lies_near(service, tmp_path):
    vectors = np.array(vectors_of(service, "encoder"))
    cosines = vectors[1:] @ vectors[0]
    async with page_of(service, tmp_path, "encoder") as page:
        title = "document.getElementById('texts-title').checkVisibility()"
        assert await page.until(title)
        assert not await page.read("document.getElementById('prompt').checkVisibility()")
        await page.until("!document.getElementById('flow').checkVisibility()")
        await fill_in(page, TEXTS[0], TEXTS[1:])
        await page.until(f"{ROWS}.length === 3")
        result = await page.read("document.getElementById('result').innerText")
        assert f"A vector of {vectors.shape[1]} values" in result
        texts, scores = shown_rows(await page.read(ROWS))
        assert texts == [TEXTS[1 + i] for i in np.argsort(-cosines)]
        np.testing.assert_allclose(scores, np.sort(cosines)[::-1], atol=2e-3)
        await page.until("parseFloat(document.querySelector('[data-value=rate]').innerText) > 0")


@pytest.mark.asyncio
@skip_without("chromium")
async def test_the_page_of_a_cross_encoder_scores_texts_and_a_decoder_chats(service, tmp_path):
    asked = {"model": "reranker", "query": TEXTS[0], "documents": TEXTS[1:]}
    ranked = httpx.post(f"{service.url}/v1/rerank", json=asked).json()["results"]
    async with page_of(service, tmp_path, "reranker") as page:
        await page.until("document.getElementById('texts-send').innerText === 'Score'")
        await fill_in(page, TEXTS[0], TEXTS[1:])
        await page.until(f"{ROWS}.length === 3")
        texts, scores = shown_rows(await page.read(ROWS))
        assert texts == [one["document"]["text"] for one in ranked]
        np.testing.assert_allclose(scores, [one["relevance_score"] for one in ranked], atol=6e-4)
        await page.read("document.getElementById('model').focus()")
        await page.type("last")
        await page.until("document.getElementById('prompt').checkVisibility()")
        assert not await page.read("document.getElementById('texts-form').checkVisibility()")


def test_cards_say_what_a_model_is_for(service):
    cards = httpx.get(f"{service.url}/v1/models").json()["data"]
    tasks = {card["id"]: card["task"] for card in cards}
    assert tasks == {"last": "generate", "mean": "embed", "encoder": "embed", "reranker": "score"}
