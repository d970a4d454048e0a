"""Two models in one application on a real Ray with real engines and stock clients."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import grpc
import httpx
import openai
import pytest
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families

from service.model_names import model_folder
from service.proto import inference_pb2_grpc
from tests.fakes.adapters import greedy_tokens, merged_reference, save_adapter
from tests.fakes.tiny_models import eager_reference
from tests.integration.services import (
    grpc_request,
    is_ready,
    replica_processes,
    running_service,
    settled,
    wait_until,
)

APP = "several-models"
MAIN, DRAFT = "main", "org/draft"
PROMPT = "def __init__(self"
ENGINE = {"kv_cache_bytes": 64 << 20, "num_cpu_threads": 1}
MODELS = {
    MAIN: {"engine": {**ENGINE, "model": "builtin", "max_context_len": 96, "max_loras": 2}},
    DRAFT: {
        "engine": {**ENGINE, "model": "builtin-draft", "max_context_len": 256},
        "replica": {"cpus_per_rank": 0.2},
    },
}


@pytest.fixture(scope="module")
def service(ray_session):
    auth = {"admin_api_keys": ["operator"]}
    with running_service(APP, 18300, models=MODELS, auth=auth) as running:
        yield running


def client_at(service, path="/v1"):
    return OpenAI(base_url=service.url + path, api_key="none", max_retries=0, timeout=60)


def text_of(client, model, max_tokens=24):
    answer = client.completions.create(
        model=model, prompt=PROMPT, max_tokens=max_tokens, temperature=0
    )
    assert answer.model == model
    return answer.choices[0].text


def grpc_text(service, model):
    request = grpc_request(PROMPT, 24)
    request.model = model
    with grpc.insecure_channel(service.grpc_address) as channel:
        return inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=60)


def test_the_same_model_answers_by_field_by_route_and_over_grpc(service):
    texts = {}
    for model in (MAIN, DRAFT):
        texts[model] = text_of(client_at(service), model)
        assert text_of(client_at(service, f"/models/{model}/v1"), model) == texts[model]
        answer = grpc_text(service, model)
        assert (answer.model, answer.choices[0].text) == (model, texts[model])
        unnamed = httpx.post(
            f"{service.url}/models/{model}/v1/completions",
            json={"prompt": PROMPT, "max_tokens": 24, "temperature": 0},
            timeout=60,
        )
        assert unnamed.json()["choices"][0]["text"] == texts[model]
    assert texts[MAIN] != texts[DRAFT]


def test_each_engine_has_its_own_settings(service):
    listed = {model.id: model for model in client_at(service).models.list().data}
    assert {name: model.max_model_len for name, model in listed.items()} == {MAIN: 96, DRAFT: 256}
    assert readiness(service) == {MAIN: True, DRAFT: True}
    with pytest.raises(openai.BadRequestError) as caught:
        text_of(client_at(service), MAIN, max_tokens=200)
    assert caught.value.code == "context_length_exceeded"
    assert text_of(client_at(service), DRAFT, max_tokens=200)


def load_adapter(service, call, **body):
    reply = httpx.post(
        f"{service.url}/v1/{call}_lora_adapter",
        json={"lora_name": "noisy", **body},
        headers={"authorization": "Bearer operator"},
        timeout=60,
    )
    assert reply.status_code == 200, reply.text


def test_an_adapter_is_a_model_from_when_it_is_loaded_to_when_it_is_not(service, tmp_path):
    base = eager_reference(model_folder("builtin"))
    folder = save_adapter(tmp_path / "noisy", base, seed=0, rank=4)
    client = client_at(service)
    before = text_of(client, MAIN)
    load_adapter(service, "load", lora_path=str(folder), model=MAIN)
    listed = {model.id: model.parent for model in client.models.list().data}
    assert listed == {MAIN: None, "noisy": MAIN, DRAFT: None}
    merged = merged_reference(model_folder("builtin"), folder)
    answer = client.completions.create(
        model="noisy",
        prompt=PROMPT,
        max_tokens=8,
        temperature=0,
        extra_body={"return_token_ids": True},
    )
    choice = answer.choices[0]
    expected = greedy_tokens(merged, choice.prompt_token_ids, 8)
    assert choice.token_ids == expected[: len(choice.token_ids)]
    assert grpc_text(service, "noisy").model == "noisy"
    # Beside it and behind it the model is what it was.
    assert text_of(client, MAIN) == before
    load_adapter(service, "unload")
    with pytest.raises(openai.NotFoundError):
        text_of(client, "noisy")


def operate(service, method, path):
    reply = httpx.request(
        method,
        f"{service.url}{path}model={MAIN}",
        headers={"authorization": "Bearer operator"},
        timeout=120,
    )
    assert reply.status_code == 200, reply.text
    return reply


def test_a_model_sleeps_while_the_other_answers_and_wakes_with_its_text(service):
    client = client_at(service)
    before = text_of(client, MAIN)
    for level in (1, 2):
        operate(service, "POST", f"/sleep?level={level}&mode=wait&")
        assert operate(service, "GET", "/is_sleeping?").json() == {"is_sleeping": True}
        refused = httpx.post(
            f"{service.url}/v1/completions", json={"model": MAIN, "prompt": PROMPT}, timeout=60
        )
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "10")
        assert refused.json()["error"]["code"] == "model_sleeping"
        with pytest.raises(grpc.RpcError) as caught:
            grpc_text(service, MAIN)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert text_of(client, DRAFT)
        assert is_ready(service.url)
        operate(service, "POST", "/wake_up?")
        assert operate(service, "GET", "/is_sleeping?").json() == {"is_sleeping": False}
        assert text_of(client, MAIN) == before


def test_unknown_models_and_no_model_are_typed_errors(service):
    for client in (client_at(service), client_at(service, f"/models/{MAIN}/v1")):
        with pytest.raises(openai.NotFoundError) as caught:
            text_of(client, "builtin")
        assert caught.value.code == "model_not_found"
    for model, code in (
        ("builtin", grpc.StatusCode.NOT_FOUND),
        ("", grpc.StatusCode.INVALID_ARGUMENT),
    ):
        with pytest.raises(grpc.RpcError) as refused:
            grpc_text(service, model)
        assert refused.value.code() is code
    assert httpx.post(f"{service.url}/v1/completions", json={"prompt": "x"}).status_code == 400


def series(service, name):
    """Values of a metric summed by their label `model`."""
    sums = {}
    for family in text_string_to_metric_families(httpx.get(service.metrics_url).text):
        for sample in family.samples:
            if sample.name == name:
                model = sample.labels.get("model", "")
                sums[model] = sums.get(model, 0.0) + sample.value
    return sums


def test_metrics_of_the_models_do_not_mix(service):
    name = "tessera_requests_accepted_total"
    wait_until(lambda: set(series(service, name)) == {MAIN, DRAFT})
    before = settled(lambda: series(service, name))
    for _ in range(3):
        text_of(client_at(service), DRAFT, max_tokens=1)
    wait_until(lambda: series(service, name)[DRAFT] == before[DRAFT] + 3)
    assert series(service, name)[MAIN] == before[MAIN]
    for of_engine in ("tessera_output_tokens_total", "tessera_kv_pages"):
        assert set(series(service, of_engine)) == {MAIN, DRAFT}


def test_a_model_that_lost_its_replica_leaves_the_other_answering(service):
    (main,) = replica_processes(APP, "Engine-main")
    (draft,) = replica_processes(APP, "Engine-org_draft")

    def ask_draft(_):
        return text_of(client_at(service), DRAFT, max_tokens=16)

    with ThreadPoolExecutor(4) as pool:
        answers = pool.map(ask_draft, range(40))
        os.kill(main.pid, signal.SIGKILL)
        wait_until(lambda: readiness(service) == {MAIN: False, DRAFT: True})
        assert status_of(service, MAIN) == 503
        assert is_ready(service.url)
        assert len(set(answers)) == 1
    wait_until(lambda: status_of(service, MAIN) == 200, timeout_s=150)
    assert draft.is_running()
    assert replica_processes(APP, "Engine-org_draft") == [draft]


def readiness(service):
    return {model.id: model.ready for model in client_at(service).models.list().data}


def status_of(service, model):
    body = {"model": model, "prompt": PROMPT, "max_tokens": 1}
    answer = httpx.post(f"{service.url}/v1/completions", json=body, timeout=60)
    if answer.status_code != 200:
        assert answer.json()["error"]["code"] in ("unavailable", "replica_lost")
    return answer.status_code
