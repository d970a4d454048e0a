"""Random requests by schema: never a server error, and a valid request still works after each."""

import asyncio
import json
import threading
from dataclasses import replace

import grpc
import hypothesis
import pytest
import schemathesis
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from service.api.anthropic.requests import CountTokensRequest, MessagesRequest
from service.api.auth import OpenAuthenticator
from service.api.grpc import SERVICE_NAME, build_grpc_server
from service.api.http import build_http_app
from service.api.live_routes import LIVE_PATH
from service.api.openai.chat import ChatCompletionRequest
from service.api.openai.completions import CompletionRequest
from service.api.openai.embeddings import EmbeddingRequest
from service.api.openai.parameters import HARMLESS
from service.api.openai.pooling import PoolingRequest
from service.api.openai.scores import RerankRequest
from service.api.openai.tokenize import DetokenizeRequest, TokenizeRequest
from service.api.responses.requests import ResponsesRequest
from service.api.services import ApiServices
from service.api.sglang.requests import GenerateBody
from service.api.web import WebSurface
from service.page.files import load_page
from service.proto import inference_pb2 as pb
from service.proto import inference_pb2_grpc as pb_grpc
from tests.fakes.random_requests import JSON_VALUES, messages_of
from tests.fakes.text import ANSWER, make_bench
from tests.integration.fuzz import grpc_calls, grpc_messages

FORBIDDEN_STATUSES = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN}


def _services(folder):
    return ApiServices(
        models=make_bench(folder).models,
        authenticator=OpenAuthenticator(),
        is_ready=lambda: True,
        version="0.1.0",
        started_s=0,
        peek_s=0.2,
    )


@pytest.fixture(scope="module")
def api_schema(tmp_path_factory):
    app = build_http_app(_services(tmp_path_factory.mktemp("http")))
    return schemathesis.openapi.from_asgi("/openapi.json", app)


# What the document leaves out: answers that no request changes, and HEAD, which is GET without its
# body.
PLAIN_PATHS = {"/openapi.json", "/metrics", LIVE_PATH, *load_page()}


def test_every_route_is_one_that_the_live_fuzz_draws_requests_for(tmp_path):
    """tests/integration/fuzz goes by the document."""
    web = WebSurface(has_metrics=True, page=load_page())
    app = build_http_app(replace(_services(tmp_path), web=web))
    drawn = {
        (method.upper(), path)
        for path, methods in app.openapi()["paths"].items()
        for method in methods
    }
    served = {
        (method, route.path.replace(":path}", "}"))
        for route in app.routes
        for method in route.methods - {"HEAD"}
    }
    assert {path for _, path in served - drawn} == PLAIN_PATHS
    assert drawn < served


def test_every_method_of_grpc_is_drawn_requests_for():
    methods = pb.DESCRIPTOR.services_by_name["Inference"].methods
    assert set(grpc_messages.REQUESTS) == {method.name for method in methods}
    for method in methods:
        assert grpc_messages.REQUESTS[method.name].DESCRIPTOR is method.input_type
    assert set(grpc_calls.STREAMS) == {method.name for method in methods if method.server_streaming}


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/completions"),
        ("POST", "/v1/chat/completions"),
        ("POST", "/generate"),
        ("POST", "/v1/messages"),
        ("POST", "/v1/responses"),
        ("GET", "/v1/responses/{response_id}/input_items"),
        ("DELETE", "/v1/responses/{response_id}"),
        ("POST", "/v1/messages/count_tokens"),
        ("POST", "/v1/embeddings"),
        ("POST", "/v1/score"),
        ("POST", "/tokenize"),
        ("POST", "/detokenize"),
        ("GET", "/v1/models"),
        ("GET", "/v1/models/{model_id}"),
        ("POST", "/models/{model_name}/v1/completions"),
        ("GET", "/models/{model_name}/v1/models/{model_id}"),
        ("GET", "/health/ready"),
    ],
)
@given(data=st.data())
@settings(max_examples=12, deadline=None, suppress_health_check=list(hypothesis.HealthCheck))
def test_http_requests_by_schema_have_no_server_errors(api_schema, method, path, data):
    response = data.draw(api_schema[path][method].as_strategy()).call()
    assert response.status_code < 500, response.text
    if response.status_code >= 400:
        error = response.json()["error"]
        assert error["code"]
        assert error["message"]


VALID = {
    "/v1/completions": {"model": "tiny", "prompt": "hello", "max_tokens": 50},
    "/v1/chat/completions": {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hello"}],
    },
    "/generate": {"text": "hello"},
    "/v1/messages": {
        "model": "tiny",
        "max_tokens": 9,
        "messages": [{"role": "user", "content": "hello"}],
    },
    "/v1/responses": {"model": "tiny", "input": "hello", "max_output_tokens": 9},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "hello"}]},
    "/v1/embeddings": {"model": "tiny", "input": "hello"},
    "/pooling": {"model": "tiny", "input": "hello"},
    "/v2/rerank": {"query": "hello", "documents": ["there", "here"]},
    "/tokenize": {"prompt": "hello"},
    "/detokenize": {"tokens": [5]},
}


@pytest.fixture(scope="module")
def http_client(tmp_path_factory):
    app = build_http_app(_services(tmp_path_factory.mktemp("http_values")))
    with TestClient(app) as client:
        yield client


def _names_of(path):
    model = {
        "/v1/completions": CompletionRequest,
        "/v1/chat/completions": ChatCompletionRequest,
        "/generate": GenerateBody,
        "/v1/messages": MessagesRequest,
        "/v1/responses": ResponsesRequest,
        "/v1/messages/count_tokens": CountTokensRequest,
        "/v1/embeddings": EmbeddingRequest,
        "/pooling": PoolingRequest,
        "/v2/rerank": RerankRequest,
        "/tokenize": TokenizeRequest,
        "/detokenize": DetokenizeRequest,
    }[path]
    return sorted({*model.model_fields, *HARMLESS, *MessagesRequest.harmless})


@pytest.mark.parametrize("path", list(VALID))
@given(data=st.data())
@settings(max_examples=15, deadline=None, suppress_health_check=list(hypothesis.HealthCheck))
def test_http_takes_any_value_of_any_parameter(http_client, path, data):
    names = st.sampled_from(_names_of(path)) | st.text(max_size=8)
    body = {**VALID[path], **data.draw(st.dictionaries(names, JSON_VALUES, max_size=3))}
    # json.dumps writes NaN and Infinity, which are not JSON and must be refused.
    headers = {"content-type": "application/json"}
    response = http_client.post(path, content=json.dumps(body), headers=headers)
    assert response.status_code < 500, response.text
    assert http_client.post(path, json=VALID[path]).status_code == 200


class GrpcServerThread:
    """A server in its own event loop, since hypothesis drives the client synchronously."""

    def __init__(self, services):
        self._services = services
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._server, port = self._run(self._start())
        self.channel = grpc.insecure_channel(f"127.0.0.1:{port}")

    async def _start(self):
        server, port = build_grpc_server(self._services, "127.0.0.1:0")
        await server.start()
        return server, port

    def _run(self, work):
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    def close(self):
        self.channel.close()
        self._run(self._server.stop(None))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()


@pytest.fixture(scope="module")
def grpc_server(tmp_path_factory):
    server = GrpcServerThread(_services(tmp_path_factory.mktemp("grpc")))
    yield server
    server.close()


@pytest.fixture(scope="module")
def grpc_stub(grpc_server):
    return pb_grpc.InferenceStub(grpc_server.channel)


def _call(rpc, request):
    """Any answer or typed refusal will do."""
    refusal = None
    try:
        answer = rpc(request, timeout=20)
        if isinstance(answer, grpc.Call):
            list(answer)
    except grpc.RpcError as error:
        refusal = error
    if refusal is not None:
        assert refusal.code() not in FORBIDDEN_STATUSES, refusal
        assert dict(refusal.trailing_metadata())["tessera-error-code"]


def _assert_still_works(stub):
    answer = stub.Generate(pb.GenerateRequest(text=pb.Text(text="hello")), timeout=20)
    assert answer.choices[0].text == ANSWER


@pytest.mark.parametrize(
    ("method", "kind"),
    [
        ("Generate", pb.GenerateRequest),
        ("GenerateStream", pb.GenerateRequest),
        ("Embed", pb.EmbedRequest),
        ("Score", pb.ScoreRequest),
        ("Tokenize", pb.TokenizeRequest),
        ("Detokenize", pb.DetokenizeRequest),
        ("GetModel", pb.GetModelRequest),
    ],
)
@given(data=st.data())
@settings(max_examples=12, deadline=None, suppress_health_check=list(hypothesis.HealthCheck))
def test_grpc_has_no_internal_errors(grpc_stub, method, kind, data):
    fields = data.draw(messages_of(kind.DESCRIPTOR))
    prompts = [name for name in ("text", "chat", "token_ids") if name in fields]
    if len(prompts) > 1 and method != "Detokenize":
        for name in prompts[1:]:
            del fields[name]
    _call(getattr(grpc_stub, method), kind(**fields))
    _assert_still_works(grpc_stub)


@given(data=st.binary(max_size=60))
@settings(max_examples=12, deadline=None, suppress_health_check=list(hypothesis.HealthCheck))
def test_grpc_survives_random_bytes(grpc_server, data):
    _call(grpc_server.channel.unary_unary(f"/{SERVICE_NAME}/Generate"), data)
    _assert_still_works(pb_grpc.InferenceStub(grpc_server.channel))
