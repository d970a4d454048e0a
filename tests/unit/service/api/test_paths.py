"""Paths with a slash at their end, and HEAD, on every route there is."""

import asyncio

import httpx
import pytest
from fastapi.routing import APIRoute

from service.deployments.listeners import HttpServer, bind_shared

pytestmark = pytest.mark.asyncio
COMPLETION = {"model": "tiny", "prompt": "hi", "max_tokens": 4}


@pytest.mark.parametrize("path", ["/v1/completions/", "/models/tiny/v1/completions/"])
async def test_a_slash_at_the_end_changes_nothing_and_the_body_arrives(client, bench, path) -> None:
    answer = await client.post(path, json=COMPLETION)
    assert answer.status_code == 200
    assert not answer.history
    assert len(bench.backend.requests) == 1


@pytest.mark.parametrize("path", ["/health/", "/v1/models/", "/v1/models/tiny/", "/version/"])
async def test_what_is_read_is_the_same_with_a_slash(client, path) -> None:
    with_slash, without = await client.get(path), await client.get(path[:-1])
    assert with_slash.status_code == 200
    assert with_slash.content == without.content


async def test_only_one_slash_is_taken_and_the_root_keeps_its_own(client) -> None:
    for path in ("/", "/v1/models//"):
        assert (await client.get(path)).status_code == 404


async def test_an_error_of_a_path_with_a_slash_has_the_shape_of_its_protocol(client) -> None:
    answer = await client.post("/v1/messages/", json={"nonsense": 1})
    assert answer.json()["type"] == "error"


async def test_every_route_that_answers_get_answers_head(app) -> None:
    methods = {}
    for route in app.routes:
        if isinstance(route, APIRoute):
            methods.setdefault(route.path, set()).update(route.methods)
    assert methods
    assert all("HEAD" in known for known in methods.values() if "GET" in known)
    assert all("head" not in operations for operations in app.openapi()["paths"].values())


async def test_head_has_the_length_of_the_answer_and_no_body_over_a_socket(app) -> None:
    listener = bind_shared("127.0.0.1", 0)
    server = HttpServer(app, keep_alive_timeout_s=5, drain_timeout_s=5)
    await server.start(listener)
    port = listener.getsockname()[1]
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            whole = await client.get("/v1/models")
            head = await client.head("/v1/models/")
            # On the same connection: a body left over would be taken for the next answer.
            again = await client.get("/version")
    finally:
        await asyncio.wait_for(server.stop(), 10)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == str(len(whole.content))
    assert again.json() == {"version": "0.1.0"}
