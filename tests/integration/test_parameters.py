"""Parameters on the real service: seeds, n, stop strings, log probabilities, salts, API keys."""

import json

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from service.proto import inference_pb2_grpc
from tests.integration.services import grpc_request, running_service

KEY = {"authorization": "Bearer right"}
BODY = {"model": "builtin", "prompt": "def __init__(self", "max_tokens": 24}


@pytest.fixture(scope="module")
def service(ray_session):
    engine = {"kv_cache_bytes": 64 << 20, "page_size": 16}
    with running_service("parameters", 18700, engine=engine, auth={"api_keys": "right"}) as running:
        yield running


@pytest.fixture(scope="module")
def client(service):
    with httpx.Client(base_url=service.url, headers=KEY, timeout=60) as http:
        yield http


def choices(client, **parameters):
    answer = client.post("/v1/completions", json={**BODY, **parameters})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"]


def test_a_seed_gives_the_same_text_twice_and_each_of_n_its_own(client) -> None:
    (first,), (again,), (next_seed,) = (choices(client, seed=seed) for seed in (7, 7, 8))
    assert first["text"] == again["text"] != next_seed["text"]
    several = choices(client, seed=7, n=3)
    assert [choice["index"] for choice in several] == [0, 1, 2]
    assert [c["text"] for c in several[:2]] == [first["text"], next_seed["text"]]


def test_a_stop_string_across_tokens_ends_text_and_stream_alike(client) -> None:
    whole = choices(client, temperature=0)[0]["text"]
    stop = whole[5:9]
    (choice,) = choices(client, temperature=0, stop=[stop])
    assert choice["text"] == whole[: whole.index(stop)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    body = {**BODY, "temperature": 0, "stop": [stop], "stream": True}
    lines = client.post("/v1/completions", json=body).text.split("\n\n")
    events = [json.loads(line[6:]) for line in lines if line and "[DONE]" not in line]
    assert "".join(event["choices"][0]["text"] for event in events) == choice["text"]


def test_prompt_log_probabilities_are_the_same_cold_and_with_a_cached_prefix(client) -> None:
    prompt = [5 + i % 50 for i in range(40)]
    first, again = (
        choices(client, prompt=prompt, prompt_logprobs=1, max_tokens=1)[0]["prompt_logprobs"]
        for _ in range(2)
    )
    assert first == again
    assert first[0] is None
    assert all(
        entry[str(t)]["logprob"] <= 0 for t, entry in zip(prompt[1:], first[1:], strict=True)
    )


def test_prefixes_are_shared_within_a_salt_only(client) -> None:
    prompt = [7 + i % 90 for i in range(100)]

    def num_cached(**salt):
        body = {**BODY, "prompt": prompt, "max_tokens": 1, **salt}
        usage = client.post("/v1/completions", json=body).json()["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    salts = ({"cache_salt": "a"}, {"cache_salt": "b"}, {}, {"cache_salt": "a"})
    assert [num_cached(**salt) for salt in salts] == [0, 0, 0, 96]


@pytest.mark.parametrize("key", [None, "Bearer wrong", "Bearer", "right"])
def test_http_wants_the_key_everywhere_but_for_health(service, key) -> None:
    headers = {} if key is None else {"authorization": key}
    with httpx.Client(base_url=service.url, headers=headers) as http:
        for path in ("/v1/models", "/openapi.json", "/version", "/absent"):
            assert http.get(path).status_code == 401
        assert http.post("/v1/completions", json=BODY).json()["error"]["code"] == "invalid_api_key"
        assert http.get("/health/live").status_code == 200
        assert http.get("/health/ready").status_code == 200


def test_grpc_wants_the_key_everywhere_but_for_health(service) -> None:
    with grpc.insecure_channel(service.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        listing = reflection_pb2.ServerReflectionRequest(list_services="")
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo
        request = grpc_request("def ", 2)
        for call in (
            lambda: stub.Generate(request, timeout=30),
            lambda: list(stub.GenerateStream(request, timeout=30)),
            lambda: list(reflection(iter([listing]), timeout=30)),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                call()
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert stub.Generate(request, timeout=30, metadata=tuple(KEY.items())).choices
        (answer,) = reflection(iter([listing]), timeout=30, metadata=tuple(KEY.items()))
        names = {service.name for service in answer.list_services_response.service}
        assert "tessera.v1.Inference" in names
        health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert health.status == health_pb2.HealthCheckResponse.SERVING
