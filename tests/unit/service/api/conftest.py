"""An HTTP application on a fake backend, and clients for it that need no socket."""

import httpx
import openai
import pytest
import pytest_asyncio

from service.api.auth import OpenAuthenticator
from service.api.http import build_http_app
from service.api.services import ApiServices
from tests.fakes.text import make_bench


@pytest.fixture
def bench(tmp_path):
    return make_bench(tmp_path)


@pytest.fixture
def services(bench):
    return ApiServices(
        models=bench.models,
        authenticator=OpenAuthenticator(),
        is_ready=lambda: True,
        version="0.1.0",
        started_s=1_700_000_000,
        peek_s=0.2,
    )


@pytest.fixture
def app(services):
    return build_http_app(services)


@pytest_asyncio.fixture
async def client(app):
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://tessera") as client:
        yield client


@pytest.fixture
def openai_client(client):
    return openai.AsyncOpenAI(
        base_url="http://tessera/v1", api_key="none", http_client=client, max_retries=0
    )
