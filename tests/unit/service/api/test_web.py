"""The page's files and the routes that are polled: who may ask, what is answered, what is noted."""

import dataclasses

import httpx
import pytest

from service.api.auth import make_authenticator
from service.api.http import build_http_app
from service.api.web import WebSurface
from service.observability.live import LiveState
from service.page.files import load_page
from tests.fakes.callers import callers_of
from tests.fakes.live import FakeReader, make_replica

KEY = {"authorization": "Bearer key"}
POLLED = ("/load", "/get_load", "/metrics", "/page/live")


class Observer:
    """Counts what is logged and traced."""

    num_begun = 0

    def begin(self, record, traceparent="", tracestate=""):
        self.num_begun += 1

    def end(self, record):
        pass


@pytest.fixture
def serve(services):
    """A client of a server with keys and such a surface."""
    keyed = dataclasses.replace(services, authenticator=make_authenticator(callers_of("key")))

    def start(observer=None, **surface):
        told = {"reader": FakeReader(), **surface}
        changed = dataclasses.replace(
            keyed, web=WebSurface(**told), observer=observer or services.observer
        )
        transport = httpx.ASGITransport(app=build_http_app(changed))
        return httpx.AsyncClient(transport=transport, base_url="http://tessera")

    return start


def test_the_package_has_every_file_that_the_page_names_and_no_other() -> None:
    page = load_page()
    text = b"".join(file.content for file in page.values()).decode()
    named = {path for path in page if path != "/" and path.removeprefix("/page/") in text}
    assert named == page.keys() - {"/"}
    assert {file.media_type.partition(";")[0] for file in page.values()} == {
        "text/html",
        "text/css",
        "text/javascript",
        "image/svg+xml",
    }


@pytest.mark.parametrize(
    "forbidden", ["http://", "https://", "//cdn", "innerHTML", "eval(", "style="]
)
def test_nothing_of_the_page_leads_elsewhere_or_makes_markup_of_text(forbidden) -> None:
    for path, file in load_page().items():
        text = file.content.decode().replace("http://www.w3.org/2000/svg", "")
        assert forbidden not in text, path


@pytest.mark.asyncio
async def test_the_pages_files_are_open_and_bound_to_their_own_origin(serve) -> None:
    async with serve(page=load_page()) as client:
        for path, file in load_page().items():
            answer = await client.get(path)
            assert answer.status_code == 200
            assert answer.content == file.content
            assert answer.headers["content-type"] == file.media_type
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "frame-ancestors 'none'" in policy
            assert "unsafe" not in policy
            assert "*" not in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert (await client.head(path)).status_code == 200


@pytest.mark.asyncio
async def test_without_the_page_there_is_nothing_at_its_paths(serve) -> None:
    async with serve() as client:
        for path in ("/", "/page/app.js", "/page/live", "/metrics"):
            assert (await client.get(path)).status_code == 401
            assert (await client.get(path, headers=KEY)).status_code == 404


@pytest.mark.asyncio
@pytest.mark.parametrize("path", POLLED)
async def test_what_is_polled_wants_a_key_and_is_neither_logged_nor_traced(
    serve, bench, path
) -> None:
    observer = Observer()
    async with serve(observer, page=load_page(), has_metrics=True) as client:
        assert (await client.get(path, headers=KEY)).status_code == 200
        assert bench.metrics.calls == []
        assert (await client.get(path)).status_code == 401
        assert bench.metrics.named("rejected") == ["invalid_api_key"]
        assert observer.num_begun == 0
        await client.get("/v1/models", headers=KEY)
        assert observer.num_begun == 1


@pytest.mark.asyncio
async def test_load_is_told_as_vllm_and_as_sglang_tell_it(serve) -> None:
    replicas = [make_replica("e1"), make_replica("e2", num_running=0, num_waiting=0)]
    async with serve(reader=FakeReader(LiveState(7, replicas))) as client:
        assert (await client.get("/load", headers=KEY)).json() == {"server_load": 7}
        loads = (await client.get("/get_load", headers=KEY)).json()
    assert loads == [
        {
            "dp_rank": rank,
            "num_reqs": num_reqs,
            "num_waiting_reqs": num_waiting,
            "num_tokens": 540,
            "num_pending_tokens": 40,
        }
        for rank, (num_reqs, num_waiting) in enumerate([(5, 3), (0, 0)])
    ]


@pytest.mark.asyncio
async def test_metrics_are_prometheus_text(serve) -> None:
    async with serve(has_metrics=True) as client:
        answer = await client.get("/metrics", headers=KEY)
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert answer.text.startswith("# HELP tessera_steps")


@pytest.mark.asyncio
async def test_the_live_state_is_what_the_page_reads(serve) -> None:
    async with serve(page=load_page()) as client:
        state = (await client.get("/page/live", headers=KEY)).json()
    (replica,) = state["replicas"]
    assert state["num_live_requests"] == 5
    assert replica["phases"] == [
        {"phase": "decode", "num_measured_steps": 10, "seconds": 0.02, "least_seconds": None}
    ]


@pytest.mark.asyncio
async def test_a_service_without_an_exporter_says_so(services) -> None:
    transport = httpx.ASGITransport(app=build_http_app(services))
    async with httpx.AsyncClient(transport=transport, base_url="http://tessera") as client:
        answer = await client.get("/load")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
