"""An HTTP application on a fake backend, and clients for it that need no socket."""

import asyncio
from dataclasses import replace

import grpc.aio
import httpx
import openai
import pytest
import pytest_asyncio

from service.api.auth import OpenAuthenticator
from service.api.grpc import GrpcOptions, build_grpc_server
from service.api.grpc_doorkeeper import Doorkeeper
from service.api.http import build_http_app
from service.api.services import ApiServices
from service.security.callers import ANONYMOUS
from service.security.connections import GrpcConnectionLimits
from service.security.quota import make_quota
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


@pytest.fixture
def caller_quota(services):
    """Gives everybody's calls, one caller's, these limits."""

    def limit(limits):
        quota = make_quota("key", limits, lambda: 0.0)
        services.authenticator._caller = replace(ANONYMOUS, quota=quota)

    return limit


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


@pytest_asyncio.fixture
async def serve_grpc(services):
    """Serves with such connection limits; returns the address. Channels end with the test."""
    servers, channels, keepers = [], [], []

    async def start(max_concurrent_calls=8192, **limits):
        connections = GrpcConnectionLimits(**limits)
        options = GrpcOptions(max_concurrent_calls=max_concurrent_calls, connections=connections)
        doorkeeper = Doorkeeper(connections)
        server, port = build_grpc_server(services, "127.0.0.1:0", options, doorkeeper=doorkeeper)
        await server.start()
        keepers.append(asyncio.create_task(doorkeeper.run()))
        servers.append(server)

        def connect(*options):
            # Otherwise channels to one address share a connection.
            own = (("grpc.use_local_subchannel_pool", 1), *options)
            channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=own)
            channels.append(channel)
            return channel

        connect.port = port
        return connect

    yield start
    for channel in channels:
        await channel.close()
    for keeper in keepers:
        keeper.cancel()
    for server in servers:
        await server.stop(None)
