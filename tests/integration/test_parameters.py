"""Parameters on the real service: seeds, n, stop strings, log probabilities, salts, API keys,
structured output."""

import json
import re
from typing import Literal

import grpc
import httpx
import jsonschema
import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from pydantic import BaseModel, Field

from service.proto import inference_pb2, inference_pb2_grpc
from tests.integration.services import grpc_request, running_service

KEY = {"authorization": "Bearer right"}
BODY = {"model": "builtin", "prompt": "def __init__(self", "max_tokens": 24}


@pytest.fixture(scope="module")
def service(ray_session):
    engine = {"kv_cache_bytes": 64 << 20, "page_size": 16}
    with running_service("parameters", 18980, engine=engine, auth={"api_keys": "right"}) as running:
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


class Step(BaseModel, extra="forbid"):
    action: Literal["read", "write"]
    line: int = Field(ge=0, le=9999)


class Plan(BaseModel, extra="forbid"):
    """Bounded, so that a model without sense ends it."""

    title: str = Field(max_length=12)
    steps: list[Step] = Field(min_length=1, max_length=2)
    is_done: bool | None


MESSAGES = [{"role": "user", "content": "Make a plan."}]


@pytest.fixture(scope="module")
def openai_client(service):
    with openai.OpenAI(
        base_url=f"{service.url}/v1", api_key="right", max_retries=0, timeout=120
    ) as client:
        yield client


def test_a_model_of_pydantic_is_parsed_by_the_stock_client(openai_client) -> None:
    answer = openai_client.chat.completions.parse(
        model="builtin", messages=MESSAGES, response_format=Plan, seed=3, max_tokens=300
    )
    (choice,) = answer.choices
    assert choice.finish_reason == "stop"
    assert isinstance(choice.message.parsed, Plan)


def test_every_choice_at_temperature_1_is_valid_and_streams_alike(openai_client) -> None:
    schema = {"name": "plan", "schema": Plan.model_json_schema(), "strict": False}
    asked = {
        "model": "builtin",
        "messages": MESSAGES,
        "response_format": {"type": "json_schema", "json_schema": schema},
        "n": 4,
        "seed": 5,
        "max_tokens": 300,
        "logprobs": True,
    }
    texts = {}
    for choice in openai_client.chat.completions.create(**asked).choices:
        texts[choice.index] = choice.message.content
        assert choice.finish_reason == "stop"
        assert choice.logprobs.content
        jsonschema.validate(json.loads(choice.message.content), schema["schema"])
    assert len(texts) == 4
    assert len(set(texts.values())) > 1
    streamed = dict.fromkeys(texts, "")
    for chunk in openai_client.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts


TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in (("plan", Plan.model_json_schema()), ("step", Step.model_json_schema()))
]
FORCED = {"type": "function", "function": {"name": "plan"}}
ASKED = {"model": "builtin", "messages": MESSAGES, "tools": TOOLS, "max_tokens": 400, "n": 2}


@pytest.mark.parametrize("seed", [1, 2])
def test_a_forced_call_has_valid_arguments_and_streams_alike(openai_client, seed) -> None:
    asked = {**ASKED, "tool_choice": FORCED, "seed": seed}
    answer = openai_client.chat.completions.create(**asked)
    with openai_client.chat.completions.stream(**asked) as stream:
        streamed = stream.get_final_completion()
    for choice, other in zip(answer.choices, streamed.choices, strict=True):
        assert choice.finish_reason == other.finish_reason == "tool_calls"
        assert choice.message.content is None
        (call,), (again,) = choice.message.tool_calls, other.message.tool_calls
        assert call.function.name == again.function.name == "plan"
        assert call.function.arguments == again.function.arguments
        Plan.model_validate_json(call.function.arguments)


def test_a_required_call_and_its_result_go_on_as_a_conversation(openai_client) -> None:
    asked = {**ASKED, "seed": 3, "n": 1, "parallel_tool_calls": False}
    answer = openai_client.chat.completions.create(**asked, tool_choice="required")
    message = answer.choices[0].message
    (call,) = message.tool_calls
    assert call.function.name in ("plan", "step")
    result = {"role": "tool", "tool_call_id": call.id, "content": "done"}
    asked["messages"] = [*MESSAGES, message.model_dump(exclude_none=True), result]
    asked["max_tokens"] = 8
    assert openai_client.chat.completions.create(**asked).choices[0].finish_reason


@pytest.mark.parametrize(
    ("asked", "pattern"),
    [
        ({"structured_outputs": {"regex": r"\d{3}-\w{2}"}}, r"[0-9]{3}-[0-9A-Za-z_]{2}"),
        ({"guided_choice": ["yes", "no, never"], "ignore_eos": True}, "yes|no, never"),
        ({"guided_grammar": 'start: "a" ("+" "a")? '}, r"a(\+a)?"),
        ({"response_format": {"type": "json_object"}, "stop": ["}"]}, r"\{[^}]*"),
    ],
)
def test_a_completion_is_what_was_asked_for(client, asked, pattern) -> None:
    for choice in choices(client, n=2, seed=5, max_tokens=200, **asked):
        assert choice["finish_reason"] == "stop"
        assert re.fullmatch(pattern, choice["text"]), choice["text"]


def test_grpc_streams_what_was_asked_for(service) -> None:
    request = grpc_request("Choose: ", 20)
    request.choice.texts.extend(["left", "right"])
    with grpc.insecure_channel(service.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        chunks = list(stub.GenerateStream(request, timeout=30, metadata=tuple(KEY.items())))
    assert "".join(chunk.choice.text for chunk in chunks) in ("left", "right")


def test_a_stock_grpc_client_gets_the_same_call_whole_and_in_parts(service) -> None:
    request = inference_pb2.GenerateRequest(sampling={"max_tokens": 400, "seed": 1})
    request.chat.messages.add(role="user", content="Plan it.")
    for name, schema in (("plan", Plan.model_json_schema()), ("step", Step.model_json_schema())):
        request.chat.tools.add(name=name, parameters_json=json.dumps(schema))
    request.chat.tool_choice_function = "plan"
    key = tuple(KEY.items())
    with grpc.insecure_channel(service.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        (whole,) = stub.Generate(request, timeout=60, metadata=key).choices
        chunks = list(stub.GenerateStream(request, timeout=60, metadata=key))
    assert whole.finish_reason == inference_pb2.FINISH_REASON_TOOL_CALLS
    (call,) = whole.tool_calls
    Plan.model_validate_json(call.arguments)
    parts = [part for chunk in chunks for part in chunk.choice.tool_calls]
    assert [part.name for part in parts if part.id] == [call.name] == ["plan"]
    assert "".join(part.arguments for part in parts) == call.arguments


def test_a_hostile_schema_is_refused_by_name_while_others_are_answered(client) -> None:
    patterns = [{"type": "string", "pattern": f"(a|b)*a(a|b){{{n}}}"} for n in range(8, 24)]
    answer = client.post("/v1/completions", json={**BODY, "guided_json": {"allOf": patterns}})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (
        400,
        "limit_exceeded",
        "guided_json",
    )
    assert choices(client, guided_regex="a")[0]["text"] == "a"


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
