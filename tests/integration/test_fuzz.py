"""The real service under requests drawn from its own schemas: no 5xx, no INTERNAL, still alive."""

import json

import grpc
import httpx
import hypothesis
import pytest
import schemathesis
from hypothesis import given, settings
from hypothesis import strategies as st

from service.proto import inference_pb2 as pb
from service.proto import inference_pb2_grpc as pb_grpc
from tests.fakes.random_requests import JSON_VALUES, messages_of
from tests.integration.services import grpc_text, running_service, wait_until

FORBIDDEN_STATUSES = {
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.DEADLINE_EXCEEDED,
}
OPERATIONS = [
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/v1/models/{model_id}"),
]
FUZZ = settings(max_examples=40, deadline=None, suppress_health_check=list(hypothesis.HealthCheck))
VALID = {"model": "builtin", "prompt": "def ", "max_tokens": 2, "temperature": 0}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def service(ray_session):
    engine = {"max_context_len": 256, "num_pages": 400, "check_integrity_when_idle": True}
    with running_service("fuzz", 18400, engine=engine) as running:
        yield running
        wait_until(lambda: running.metric("tessera_kv_pages_used") == 0)
        wait_until(lambda: running.metric("tessera_live_requests") == 0)


@pytest.fixture(scope="module")
def schema(service):
    return schemathesis.openapi.from_url(f"{service.url}/openapi.json")


@pytest.fixture(scope="module")
def client(service):
    with httpx.Client(base_url=service.url, timeout=60) as http:
        yield http


def assert_alive(client: httpx.Client) -> None:
    assert client.post("/v1/completions", json=VALID).status_code == 200


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
@given(data=st.data())
@FUZZ
def test_requests_by_the_openapi_schema_have_no_server_errors(schema, client, method, path, data):
    response = data.draw(schema[path][method].as_strategy()).call()
    assert response.status_code < 500, response.text
    if response.status_code >= 400:
        assert response.json()["error"]["code"]
    assert_alive(client)


@given(changes=st.dictionaries(st.sampled_from([*VALID, "n", "stop", "seed"]), JSON_VALUES))
@FUZZ
def test_any_value_of_any_parameter_has_no_server_error(client, changes):
    # json.dumps writes NaN and Infinity, which are not JSON and must be refused.
    body = json.dumps({**VALID, **changes})
    response = client.post(
        "/v1/completions", content=body, headers={"content-type": "application/json"}
    )
    assert response.status_code < 500, response.text
    assert_alive(client)


@pytest.mark.parametrize("method", ["Generate", "GenerateStream", "Tokenize", "Detokenize"])
@given(data=st.data())
@FUZZ
def test_messages_by_the_proto_have_no_internal_errors(service, method, data):
    kind = {"Tokenize": pb.TokenizeRequest, "Detokenize": pb.DetokenizeRequest}.get(
        method, pb.GenerateRequest
    )
    fields = data.draw(messages_of(kind.DESCRIPTOR))
    if method != "Detokenize":
        for name in [name for name in ("text", "chat", "token_ids") if name in fields][1:]:
            del fields[name]
    with grpc.insecure_channel(service.grpc_address) as channel:
        code = call(getattr(pb_grpc.InferenceStub(channel), method), kind(**fields))
    assert code not in FORBIDDEN_STATUSES
    assert grpc_text(service, "def ", 2)


def call(rpc, request) -> grpc.StatusCode:
    """The status of a call; a typed refusal must carry our error code."""
    refusal = None
    try:
        answer = rpc(request, timeout=60)
        if isinstance(answer, grpc.Call):
            list(answer)
    except grpc.RpcError as error:
        refusal = error
    if refusal is None:
        return grpc.StatusCode.OK
    code = refusal.code()
    assert code in FORBIDDEN_STATUSES or dict(refusal.trailing_metadata())["tessera-error-code"]
    return code
