"""CORS: off by default; what a browser is told before it asks, and with every answer."""

import dataclasses

import httpx
import pytest
from pydantic import ValidationError

from service.api.auth import make_authenticator
from service.api.http import build_http_app
from service.api.web import WebSurface
from service.security.cors import CorsSettings
from tests.fakes.callers import callers_of

APP = "https://app.example.com"
OTHER = "https://evil.example.com"
COMPLETION = {"model": "tiny", "prompt": "hi", "max_tokens": 4}
PREFLIGHT = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-lang",
}


@pytest.fixture
def serve(services):
    """A client of a server with such settings, and with keys."""
    keys = make_authenticator(callers_of("key"))

    def start(**settings):
        web = WebSurface(cors=CorsSettings(**settings))
        app = build_http_app(dataclasses.replace(services, authenticator=keys, web=web))
        transport = httpx.ASGITransport(app=app)
        return httpx.AsyncClient(transport=transport, base_url="http://tessera")

    return start


def cors_headers(response):
    return {name for name in response.headers if name.startswith("access-control-")}


async def preflight(client, origin):
    headers = {"origin": origin, **PREFLIGHT}
    return await client.options("/v1/completions", headers=headers)


async def ask(client, origin, key="key"):
    headers = {"origin": origin, "authorization": f"Bearer {key}"}
    return await client.post("/v1/completions", json=COMPLETION, headers=headers)


@pytest.mark.asyncio
async def test_by_default_no_other_origin_is_let_in(serve) -> None:
    async with serve() as client:
        assert (await preflight(client, APP)).status_code == 401
        answer = await ask(client, APP)
        assert answer.status_code == 200
        assert not cors_headers(answer)


@pytest.mark.asyncio
async def test_an_allowed_origin_may_ask_with_any_header_and_without_a_key_before(serve) -> None:
    async with serve(allowed_origins=(APP,)) as client:
        told = await preflight(client, APP)
        assert told.status_code == 200
        assert told.headers["access-control-allow-origin"] == APP
        assert "x-stainless-lang" in told.headers["access-control-allow-headers"]
        assert "POST" in told.headers["access-control-allow-methods"]
        assert told.headers["access-control-max-age"] == "600"
        assert "access-control-allow-credentials" not in told.headers
        answer = await ask(client, APP)
        assert answer.headers["access-control-allow-origin"] == APP
        assert "Origin" in answer.headers["vary"]
        assert "x-request-id" in answer.headers["access-control-expose-headers"]


@pytest.mark.asyncio
async def test_other_origins_are_told_nothing_that_lets_them_in(serve) -> None:
    async with serve(allowed_origins=(APP,), allow_credentials=True) as client:
        assert (await preflight(client, OTHER)).status_code == 400
        for origin in (OTHER, APP + ".evil.example.com", APP.upper(), "null"):
            assert "access-control-allow-origin" not in (await preflight(client, origin)).headers
            assert "access-control-allow-origin" not in (await ask(client, origin)).headers


@pytest.mark.asyncio
async def test_errors_can_be_read_by_an_allowed_page(serve) -> None:
    async with serve(allowed_origins=(APP,)) as client:
        refused = await ask(client, APP, key="wrong")
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == APP


@pytest.mark.asyncio
async def test_every_origin_may_be_let_in_but_never_with_credentials(serve) -> None:
    async with serve(allowed_origins=("*",)) as client:
        for response in (await preflight(client, OTHER), await ask(client, OTHER)):
            assert response.headers["access-control-allow-origin"] == "*"
            assert "access-control-allow-credentials" not in response.headers
    with pytest.raises(ValidationError, match="named origins"):
        CorsSettings(allowed_origins=("*",), allow_credentials=True)


@pytest.mark.asyncio
async def test_credentials_go_with_a_named_origin(serve) -> None:
    async with serve(allowed_origins=(APP,), allow_credentials=True) as client:
        for response in (await preflight(client, APP), await ask(client, APP)):
            assert response.headers["access-control-allow-origin"] == APP
            assert response.headers["access-control-allow-credentials"] == "true"


@pytest.mark.parametrize(
    "settings",
    [
        {"allow_credentials": True},
        {"allowed_origins": ("*", APP)},
        {"allowed_origins": (APP + "/",)},
        {"allowed_origins": ("app.example.com",)},
        {"allowed_origins": ("https://*.example.com",)},
        {"allowed_origins": ("null",)},
        {"allowed_origins": ("HTTPS://APP.EXAMPLE.COM",)},
        {"allowed_origins": (APP,), "allow_methods": ["*"]},
        {"max_age_s": -1},
    ],
)
def test_what_no_browser_sends_or_nobody_should_want_is_refused(settings) -> None:
    with pytest.raises(ValidationError):
        CorsSettings(**settings)


@pytest.mark.parametrize(
    "origin", ["http://127.0.0.1:3000", "http://[::1]:3000", "app://obsidian.md"]
)
def test_ports_addresses_and_schemes_of_programs_are_origins(origin) -> None:
    assert CorsSettings(allowed_origins=[origin]).allowed_origins == (origin,)
