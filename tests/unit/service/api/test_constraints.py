"""Structured output: every way to ask for it over HTTP and gRPC, and every refusal by its name."""

import dataclasses
import json
import re

import grpc
import httpx
import msgspec
import pytest
import pytest_asyncio

from service.api.http import build_http_app
from service.api.openai.chat import ChatCompletionRequest
from service.limits import Limits
from service.proto import inference_pb2 as pb
from service.proto import inference_pb2_grpc as pb_grpc
from service.tokenizer.constraints import JSON_OBJECT, Choices, JsonSchema, Lark, Regex
from service.tokenizer.grammars import GrammarMaker
from tests.fakes.backend import MODEL_INFO
from tests.fakes.text import make_bench

pytestmark = pytest.mark.asyncio
SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "number"}}}
TEXT = '{"type":"object","properties":{"b":{"type":"integer"},"a":{"type":"number"}}}'
BODIES = {
    "/v1/completions": {"prompt": "hi"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
}
NEEDLESS = {"disable_any_whitespace": False, "whitespace_pattern": None}


def json_schema(**fields):
    body = {"name": "point", "schema": SCHEMA, **fields}
    return {"response_format": {"type": "json_schema", "json_schema": body}}


def outputs(**fields):
    return {"structured_outputs": fields}


ASKED = {
    "an object": ({"response_format": {"type": "json_object"}}, JSON_OBJECT),
    "a strict schema": (json_schema(strict=True, description="x"), JsonSchema(TEXT)),
    "a schema": (json_schema(strict=None), JsonSchema(TEXT)),
    "a schema as far as can be": (json_schema(strict=False), JsonSchema(TEXT, is_lenient=True)),
    "json": (outputs(json=SCHEMA, **NEEDLESS), JsonSchema(TEXT)),
    "json text": (outputs(json=TEXT, regex=None), JsonSchema(TEXT)),
    "regex": (outputs(regex="a|b"), Regex("a|b")),
    "choice": (outputs(choice=["a", "b"]), Choices(("a", "b"))),
    "grammar": (outputs(grammar='start: "a"'), Lark('start: "a"')),
    "json_object": (outputs(json_object=True), JSON_OBJECT),
    "guided_json": ({"guided_json": SCHEMA}, JsonSchema(TEXT)),
    "guided_regex": ({"guided_regex": "a"}, Regex("a")),
    "guided_choice": ({"guided_choice": ["é"]}, Choices(("é",))),
    "guided_grammar": ({"guided_grammar": 'root ::= "a"'}, Lark('root ::= "a"')),
    "with a format of text": (
        {"guided_regex": "a", "response_format": {"type": "text"}, "guided_json": None},
        Regex("a"),
    ),
}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("name", ASKED)
async def test_every_choice_gets_the_grammar(client, bench, path, name):
    asked, constraint = ASKED[name]
    response = await client.post(path, json={**BODIES[path], **asked, "n": 2})
    assert response.status_code == 200, response.text
    grammar = GrammarMaker().make(constraint)
    assert [request.grammar for request in bench.backend.requests] == [grammar] * 2


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("asked", [{}, {"response_format": None}, {"guided_choice": None}])
async def test_without_one_there_is_no_grammar(client, bench, path, asked):
    assert (await client.post(path, json={**BODIES[path], **asked})).status_code == 200
    assert [request.grammar for request in bench.backend.requests] == [""]


REFUSED = [
    (outputs(json=SCHEMA, regex="a"), "invalid_request", "structured_outputs.regex", "json and"),
    (
        {"response_format": {"type": "json_object"}, "guided_choice": ["a"]},
        "invalid_request",
        "guided_choice",
        "response_format and guided_choice exclude each other",
    ),
    (outputs(), "invalid_request", "structured_outputs", "needs json, regex, choice"),
    (outputs(colour=1), "unknown_parameter", "structured_outputs.colour", "unknown"),
    (
        outputs(regex="a", whitespace_pattern=" "),
        "unsupported_parameter",
        "structured_outputs.whitespace_pattern",
        "not supported",
    ),
    (outputs(json=[1]), "invalid_request", "structured_outputs.json", "must be a JSON schema"),
    (
        outputs(json={"enum": ["y" * 100] * 20_000}),
        "invalid_request",
        "structured_outputs.json",
        "1048",
    ),
    (outputs(choice=[1]), "invalid_request", "structured_outputs.choice.0", "string"),
    (outputs(choice=[]), "limit_exceeded", "structured_outputs.choice", "between 1 and 1024"),
    ({"guided_choice": ["a"] * 1025}, "limit_exceeded", "guided_choice", "between 1 and 1024"),
    ({"guided_regex": "a" * 65537}, "limit_exceeded", "guided_regex", "at most 65536 bytes"),
    ({"guided_regex": "("}, "invalid_request", "guided_regex", "guided_regex: .*unclosed group"),
    ({"guided_json": "{"}, "invalid_request", "guided_json", "EOF"),
    (
        {"response_format": {"type": "xml"}},
        "invalid_request",
        "response_format.type",
        "'json_schema' or 'structural_tag'",
    ),
    (
        {"response_format": {"type": "json_schema"}},
        "invalid_request",
        "response_format.json_schema",
        "name and schema",
    ),
    (
        {"response_format": {"type": "text", "json_schema": {"name": "a", "schema": {}}}},
        "invalid_request",
        "response_format.json_schema",
        "needs response_format.type json_schema",
    ),
    (
        json_schema(colour=1),
        "unknown_parameter",
        "response_format.json_schema.colour",
        "unknown parameter",
    ),
    (
        json_schema(schema={"type": "object", "propertyNames": {}}),
        "invalid_request",
        "response_format",
        "response_format: .*propertyNames.*strict: false",
    ),
    ({"guided_decoding_backend": "x"}, "unsupported_parameter", "guided_decoding_backend", "not"),
]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(("asked", "code", "param", "message"), REFUSED)
async def test_refusals_name_the_parameter(client, bench, path, asked, code, param, message):
    response = await client.post(path, json={**BODIES[path], **asked})
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, code, param)
    assert re.search(message, error["message"]), error["message"]
    assert bench.backend.requests == []


async def test_numbers_that_json_does_not_have_are_the_clients_error(client):
    for number in ("1e999", "-Infinity", "1" * 5000):
        body = f'{{"prompt":"x","guided_json":{{"const":{number}}}}}'
        headers = {"content-type": "application/json"}
        response = await client.post("/v1/completions", content=body, headers=headers)
        assert response.status_code == 400, number


@pytest_asyncio.fixture
async def client_of(services):
    """Clients of applications on other benches."""
    clients = []

    def make(bench):
        app = build_http_app(dataclasses.replace(services, models=bench.models))
        transport = httpx.ASGITransport(app=app)
        clients.append(httpx.AsyncClient(transport=transport, base_url="http://tessera"))
        return clients[-1]

    yield make
    for made in clients:
        await made.aclose()


async def test_an_engine_without_grammars_refuses_by_name(client_of, tmp_path):
    info = msgspec.structs.replace(MODEL_INFO, has_grammars=False)
    bench = make_bench(tmp_path, info=info)
    for asked, param in (
        (json_schema(), "response_format"),
        ({"guided_regex": "("}, "guided_regex"),
    ):
        response = await client_of(bench).post(
            "/v1/completions", json={"prompt": "hi", "max_tokens": 1, **asked}
        )
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (400, "unsupported_parameter")
        assert error["param"] == param
    text = {"prompt": "hi", "response_format": {"type": "text"}}
    assert (await client_of(bench).post("/v1/completions", json=text)).status_code == 200


async def test_a_grammar_times_all_choices_has_a_ceiling(client_of, tmp_path):
    bench = make_bench(tmp_path, limits=Limits(max_grammar_cost_bytes=100))
    body = {"prompt": ["a"] * 5, "guided_regex": "a" * 10, "n": 2}
    assert (await client_of(bench).post("/v1/completions", json=body)).status_code == 200
    response = await client_of(bench).post("/v1/completions", json={**body, "n": 3})
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("limit_exceeded", "guided_regex")
    assert "fewer choices" in error["message"]


async def test_the_openapi_document_has_the_names_that_clients_write(client):
    schemas = (await client.get("/openapi.json")).json()["components"]["schemas"]
    assert {"json", "regex", "choice", "grammar"} <= schemas["StructuredOutputs"][
        "properties"
    ].keys()
    assert schemas["JsonSchemaFormat"]["required"] == ["name", "schema"]


async def test_a_schema_is_kept_as_it_was_written():
    body = {**BODIES["/v1/chat/completions"], **json_schema(schema={"z": "é", "a": [1.5, 10**30]})}
    parsed = ChatCompletionRequest.model_validate_json(json.dumps(body))
    written = '{"z":"é","a":[1.5,1000000000000000000000000000000]}'
    assert parsed.constraint.constraint == JsonSchema(written)


GRPC = {
    "schema": ({"json_schema": pb.JsonSchema(schema=TEXT)}, JsonSchema(TEXT)),
    "strict": ({"json_schema": pb.JsonSchema(schema=TEXT, strict=True)}, JsonSchema(TEXT)),
    "lenient": (
        {"json_schema": pb.JsonSchema(schema=TEXT, strict=False)},
        JsonSchema(TEXT, is_lenient=True),
    ),
    "object": ({"json_object": True}, JSON_OBJECT),
    "regex": ({"regex": "a|b"}, Regex("a|b")),
    "choice": ({"choice": pb.Choices(texts=["a", "b"])}, Choices(("a", "b"))),
    "grammar": ({"grammar": 'start: "a"'}, Lark('start: "a"')),
}


@pytest_asyncio.fixture
async def stub(serve_grpc):
    return pb_grpc.InferenceStub((await serve_grpc())())


@pytest.mark.parametrize("name", GRPC)
async def test_grpc_says_the_same(stub, bench, name):
    fields, constraint = GRPC[name]
    await stub.Generate(pb.GenerateRequest(text=pb.Text(text="hi"), n=2, **fields))
    grammar = GrammarMaker().make(constraint)
    assert [request.grammar for request in bench.backend.requests] == [grammar] * 2


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"json_object": False}, "json_object"),
        ({"regex": "("}, "regex"),
        ({"choice": pb.Choices()}, "choice"),
        ({"json_schema": pb.JsonSchema()}, "json_schema"),
    ],
)
async def test_grpc_refuses_by_name(stub, bench, fields, param):
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await stub.Generate(pb.GenerateRequest(text=pb.Text(text="hi"), **fields))
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert dict(raised.value.trailing_metadata())["tessera-error-param"] == param
    assert bench.backend.requests == []
