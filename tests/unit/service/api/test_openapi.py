"""The OpenAPI document describes what is really answered; its references lead somewhere."""

import re

import jsonschema
import pytest

REQUESTS = {
    "/v1/completions": {"model": "tiny", "prompt": "hello", "max_tokens": 4, "logprobs": 2},
    "/v1/chat/completions": {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hello"}],
        "logprobs": True,
        "return_token_ids": True,
    },
    "/v1/messages": {"max_tokens": 4, "messages": [{"role": "user", "content": "hello"}]},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "hello"}]},
    "/v1/embeddings": {"input": ["hello", "world"]},
    "/pooling": {"input": ["hello", "world"], "task": "embed"},
    "/v1/score": {"text_1": "hello", "text_2": ["world", "there"]},
    "/rerank": {"query": "hello", "documents": ["world", {"text": "there"}]},
    "/tokenize": {"prompt": "hello", "return_token_strs": True},
    "/detokenize": {"tokens": [5, 6]},
    "/v1/models": None,
    "/v1/models/{model_id}": None,
}


def references(part):
    if isinstance(part, dict):
        if isinstance(part.get("$ref"), str):
            yield part["$ref"]
        for value in part.values():
            yield from references(value)
    elif isinstance(part, list):
        for value in part:
            yield from references(value)


def test_every_part_of_a_path_is_a_parameter_that_must_be_there(app):
    """Endpoints read them from the request, so what describes a route has to name them."""
    found, expected = {}, {}
    for path, operations in app.openapi()["paths"].items():
        for method, operation in operations.items():
            parameters = [one for one in operation.get("parameters", ()) if one["in"] == "path"]
            found[method, path] = sorted(one["name"] for one in parameters if one["required"])
            expected[method, path] = sorted(re.findall(r"{(\w+)}", path))
    assert found == expected
    assert ["model_id", "model_name"] in found.values()


def test_every_reference_leads_to_a_schema(app):
    document = app.openapi()
    known = {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}
    assert set(references(document)) <= known


def check(document, path, method, status, answer):
    described = document["paths"][path][method]["responses"][status]
    schema = described["content"]["application/json"]["schema"]
    jsonschema.validate(answer, {**schema, "components": document["components"]})


@pytest.mark.asyncio
@pytest.mark.parametrize("path", list(REQUESTS))
async def test_answers_and_errors_are_as_described(app, client, path):
    body = REQUESTS[path]
    method = "get" if body is None else "post"
    response = await client.request(method, path.replace("{model_id}", "tiny"), json=body)
    assert response.status_code == 200
    check(app.openapi(), path, method, "200", response.json())
    wrong = path.replace("{model_id}", "other")
    if body is not None or wrong != path:
        refused = await client.request(method, wrong, json=body and {**body, "nonsense": 1})
        assert refused.status_code >= 400
        check(app.openapi(), path, method, "default", refused.json())


def test_every_operation_describes_an_answer_and_an_error(app):
    for path, operations in app.openapi()["paths"].items():
        for operation in operations.values():
            assert set(operation["responses"]) == {"200", "default"}, path
    streamed = app.openapi()["paths"]["/v1/completions"]["post"]["responses"]["200"]["content"]
    assert "text/event-stream" in streamed


@pytest.mark.asyncio
@pytest.mark.parametrize("path", ["/health", "/ping"])
async def test_what_answers_without_a_body_is_described_so(app, client, path):
    answer = await client.get(path)
    assert (answer.content, answer.headers.get("content-type")) == (b"", None)
    assert "content" not in app.openapi()["paths"][path]["get"]["responses"]["200"]
