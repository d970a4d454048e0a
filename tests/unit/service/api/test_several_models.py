"""Several models behind one API: by the field `model`, by route, over HTTP and gRPC."""

import dataclasses

import grpc
import httpx
import msgspec
import openai
import pytest
import pytest_asyncio

from service.api.auth import OpenAuthenticator, make_authenticator
from service.api.grpc import build_grpc_server
from service.api.http import build_http_app
from service.api.services import ApiServices
from service.errors import ApiError, ApiErrorCode
from service.handler.directory import ModelDirectory, ServedModel
from service.limits import Limits
from service.proto import inference_pb2 as pb
from service.proto import inference_pb2_grpc as pb_grpc
from tests.fakes.backend import MODEL_INFO, FakeBackend, make_outputs
from tests.fakes.callers import callers_of
from tests.fakes.text import RecordingMetrics, make_bench

pytestmark = pytest.mark.asyncio
SMALL, LARGE = "small", "org/large"
CONTEXT_LEN = {SMALL: 64, LARGE: 512}
COMPLETION = {"prompt": "hello", "max_tokens": 40}


class UnseenBackend(FakeBackend):
    """Of a model none of whose replicas was ever seen."""

    @property
    def info(self):
        raise ApiError(ApiErrorCode.UNAVAILABLE, "no replica is ready to take the request")

    @info.setter
    def info(self, info):
        """What a replica would have told."""


class TwoModels:
    """Each answers with its own name; everything of either is in reach."""

    def __init__(self, folder):
        self.refusals = RecordingMetrics()
        self.ready = dict.fromkeys(CONTEXT_LEN, True)
        self.benches = {name: self.bench(folder / name, name) for name in CONTEXT_LEN}

    def bench(self, folder, name):
        folder.mkdir(parents=True)
        length = CONTEXT_LEN[name]
        info = msgspec.structs.replace(
            MODEL_INFO, name=name, max_context_len=length, max_request_len=length
        )
        bench = make_bench(folder, info=info)
        answer = [*bench.tokenizer.ids(f"I am {name}"), 2]
        bench.backend.script = lambda request: make_outputs(request, answer)
        return bench

    @property
    def directory(self):
        return ModelDirectory(
            [
                ServedModel(name, bench.handler, lambda name=name: self.ready[name], name)
                for name, bench in self.benches.items()
            ],
            Limits(),
            self.refusals,
        )

    def lose(self, name):
        """All replicas of the model are gone before one was seen."""
        self.ready[name] = False
        backend = self.benches[name].backend
        self.benches[name].handler._backend = UnseenBackend(backend.script)


@pytest.fixture
def two(tmp_path):
    return TwoModels(tmp_path)


@pytest.fixture
def services(two):
    return ApiServices(
        two.directory, OpenAuthenticator(), lambda: True, "0", 1_700_000_000, peek_s=0.2
    )


@pytest_asyncio.fixture
async def client(services):
    transport = httpx.ASGITransport(app=build_http_app(services))
    async with httpx.AsyncClient(transport=transport, base_url="http://tessera") as client:
        yield client


@pytest_asyncio.fixture
async def stub(services):
    server, port = build_grpc_server(services, "127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield pb_grpc.InferenceStub(channel)
    await server.stop(None)


def openai_at(client, base):
    url = f"http://tessera{base}"
    return openai.AsyncOpenAI(base_url=url, api_key="none", http_client=client, max_retries=0)


async def code_of(response, status):
    assert response.status_code == status, response.text
    return response.json()["error"]["code"], response.json()["error"]["param"]


@pytest.mark.parametrize("name", [SMALL, LARGE])
async def test_the_field_model_picks_over_http(client, name):
    root = openai_at(client, "/v1")
    answer = await root.completions.create(model=name, **COMPLETION)
    assert (answer.model, answer.choices[0].text) == (name, f"I am {name}")
    messages = [{"role": "user", "content": "who?"}]
    stream = await root.chat.completions.create(model=name, messages=messages, stream=True)
    parts = [chunk async for chunk in stream]
    assert {part.model for part in parts} == {name}
    text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    assert text == f"I am {name}"


@pytest.mark.parametrize("name", [SMALL, LARGE])
async def test_a_route_pins_its_model_which_need_not_be_named_again(client, name):
    for body in (COMPLETION, {**COMPLETION, "model": name}):
        response = await client.post(f"/models/{name}/v1/completions", json=body)
        assert response.json()["choices"][0]["text"] == f"I am {name}"
    pinned = openai_at(client, f"/models/{name}/v1")
    chat = await pinned.chat.completions.create(
        model=name, messages=[{"role": "user", "content": "who?"}]
    )
    assert chat.choices[0].message.content == f"I am {name}"
    assert [model.id for model in (await pinned.models.list()).data] == [name]
    assert (await pinned.models.retrieve(name)).id == name


async def test_at_a_models_route_no_other_model_exists(client):
    body = {**COMPLETION, "model": LARGE}
    response = await client.post(f"/models/{SMALL}/v1/completions", json=body)
    assert await code_of(response, 404) == ("model_not_found", "model")
    response = await client.get(f"/models/{SMALL}/v1/models/{LARGE}")
    assert await code_of(response, 404) == ("model_not_found", "model")


@pytest.mark.parametrize("route", ["v1/completions", "v1/chat/completions", "tokenize"])
async def test_an_unknown_model_is_not_found_by_field_and_by_route(client, two, route):
    body = {"model": "other", "prompt": "x", "messages": [{"role": "user", "content": "x"}]}
    body.pop("prompt" if "chat" in route else "messages")
    assert await code_of(await client.post(f"/{route}", json=body), 404) == (
        "model_not_found",
        "model",
    )
    response = await client.post(f"/models/other/{route}", json=body)
    assert await code_of(response, 404) == ("model_not_found", "model")
    assert two.refusals.named("rejected") == ["model_not_found"] * 2


@pytest.mark.parametrize("route", ["/v1/completions", "/tokenize"])
async def test_at_the_root_of_several_models_one_must_be_named(client, route):
    response = await client.post(route, json={"prompt": "x"})
    assert await code_of(response, 400) == ("invalid_request", "model")
    assert f"{SMALL}, {LARGE}" in response.json()["error"]["message"]


async def test_all_models_are_listed_with_what_is_known_of_them(client, two):
    two.lose(LARGE)
    listed = {model["id"]: model for model in (await client.get("/v1/models")).json()["data"]}
    assert listed[SMALL] == (await client.get(f"/v1/models/{SMALL}")).json()
    assert (listed[SMALL]["ready"], listed[SMALL]["max_model_len"]) == (True, 64)
    assert listed[LARGE]["ready"] is False
    assert "max_model_len" not in listed[LARGE]
    assert [m.id for m in (await openai_at(client, "/v1").models.list()).data] == [SMALL, LARGE]
    response = await client.get("/v1/models/large")
    assert await code_of(response, 404) == ("model_not_found", "model")


async def test_tokens_are_those_of_the_model_that_was_picked(client, two):
    bench = two.benches[LARGE]
    response = await client.post("/tokenize", json={"model": LARGE, "prompt": "hello world"})
    assert response.json()["max_model_len"] == 512
    pinned = await client.post(f"/models/{SMALL}/tokenize", json={"prompt": "hello world"})
    assert pinned.json()["max_model_len"] == 64
    ids = bench.tokenizer.ids("hello world")
    response = await client.post(f"/models/{LARGE}/detokenize", json={"tokens": ids})
    assert response.json()["prompt"] == "hello world"


async def test_a_model_without_replicas_is_unavailable_and_the_other_answers(client, stub, two):
    two.lose(LARGE)
    response = await client.post("/v1/completions", json={**COMPLETION, "model": LARGE})
    assert await code_of(response, 503) == ("unavailable", None)
    response = await client.post("/v1/completions", json={**COMPLETION, "model": SMALL})
    assert response.json()["choices"][0]["text"] == f"I am {SMALL}"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Generate(grpc_request(LARGE))
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert (await stub.Generate(grpc_request(SMALL))).choices[0].text == f"I am {SMALL}"


@pytest.mark.parametrize("path", [f"/models/{SMALL}/v1/models", "/models/other/v1/models"])
async def test_a_models_route_wants_a_key_before_it_says_whether_the_model_exists(services, path):
    guarded = dataclasses.replace(services, authenticator=make_authenticator(callers_of("secret")))
    transport = httpx.ASGITransport(app=build_http_app(guarded))
    async with httpx.AsyncClient(transport=transport, base_url="http://tessera") as client:
        assert await code_of(await client.get(path), 401) == ("invalid_api_key", None)


async def test_each_models_requests_count_as_its_own(client, two):
    await client.post("/v1/completions", json={**COMPLETION, "model": SMALL})
    await client.post("/v1/completions", json={"prompt": "x", "model": LARGE, "n": 99})
    assert len(two.benches[SMALL].metrics.named("accepted")) == 1
    assert two.benches[SMALL].metrics.named("rejected") == []
    assert two.benches[LARGE].metrics.named("accepted") == []
    assert two.benches[LARGE].metrics.named("rejected") == ["limit_exceeded"]
    assert two.refusals.calls == []


def grpc_request(model):
    request = pb.GenerateRequest(model=model, text=pb.Text(text="hello"))
    request.sampling.max_tokens = 40
    return request


@pytest.mark.parametrize("name", [SMALL, LARGE])
async def test_the_field_model_picks_over_grpc(stub, name):
    answer = await stub.Generate(grpc_request(name))
    assert (answer.model, answer.choices[0].text) == (name, f"I am {name}")
    chunks = [chunk async for chunk in stub.GenerateStream(grpc_request(name))]
    assert "".join(chunk.choice.text for chunk in chunks) == f"I am {name}"
    tokens = await stub.Tokenize(pb.TokenizeRequest(model=name, text=pb.Text(text="hello")))
    assert tokens.max_context_tokens == CONTEXT_LEN[name]
    ids = tokens.token_ids
    text = await stub.Detokenize(pb.DetokenizeRequest(model=name, token_ids=ids))
    assert text.text == "hello"


@pytest.mark.parametrize(
    ("name", "code"),
    [("", grpc.StatusCode.INVALID_ARGUMENT), ("other", grpc.StatusCode.NOT_FOUND)],
)
async def test_grpc_refuses_no_name_and_an_unknown_one(stub, name, code):
    calls = (
        stub.Generate(grpc_request(name)),
        stub.Tokenize(pb.TokenizeRequest(model=name, text=pb.Text(text="x"))),
        stub.Detokenize(pb.DetokenizeRequest(model=name, token_ids=[5])),
        stub.GetModel(pb.GetModelRequest(name=name)),
    )
    for number, call in enumerate(calls):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert caught.value.code() is code
        if not name and number < 3:
            assert f"{SMALL}, {LARGE}" in caught.value.details()


async def test_grpc_lists_all_models(stub, two):
    two.lose(LARGE)
    small, large = (await stub.ListModels(pb.ListModelsRequest())).models
    assert (small.name, small.ready, small.max_context_tokens) == (SMALL, True, 64)
    assert (large.name, large.ready, large.max_context_tokens) == (LARGE, False, 0)
    assert await stub.GetModel(pb.GetModelRequest(name=LARGE)) == large
