"""TLS and mutual TLS in the live ingress: real Ray, stock HTTP, OpenAI and gRPC clients."""

import socket
import ssl
import time

import grpc
import httpx
import pytest
from openai import OpenAI
from ray import serve

from service.app import build_app
from service.config import parse_config
from service.deployments.control_plane import close_control_plane
from service.proto import inference_pb2 as pb
from service.proto import inference_pb2_grpc as pb_grpc
from tests.fakes.certificates import Authority
from tests.fakes.engine_factory import FakeEngineFactory
from tests.integration.services import wait_until

BASE_PORT = 18450


class Clients:
    """What clients of one service trust and show. It has three ports from first_port on."""

    def __init__(self, authority, pair, first_port, is_mutual):
        self.is_mutual = is_mutual
        self.http_port = first_port
        self.url = f"https://127.0.0.1:{first_port}"
        self.grpc_address = f"127.0.0.1:{first_port + 1}"
        self._authority = authority
        self._pair = pair

    def context(self, *, has_certificate=True):
        context = ssl.create_default_context(cafile=str(self._authority.file))
        if has_certificate:
            context.load_cert_chain(self._pair.certificate, self._pair.key)
        return context

    def credentials(self, *, has_certificate=True):
        own = (self._pair.key.read_bytes(), self._pair.certificate.read_bytes())
        key, certificate = own if has_certificate else (None, None)
        return grpc.ssl_channel_credentials(self._authority.file.read_bytes(), key, certificate)

    def is_ready(self):
        try:
            return httpx.get(f"{self.url}/health/ready", verify=self.context()).status_code == 200
        except httpx.TransportError:
            return False


@pytest.fixture(scope="module", params=[False, True], ids=["tls", "mutual"])
def clients(request, ray_session, tmp_path_factory):
    is_mutual = request.param
    authority = Authority(tmp_path_factory.mktemp("tls"), "authority")
    server = authority.issue("server")
    tls = {"certificate_file": str(server.certificate), "key_file": str(server.key)}
    if is_mutual:
        tls["client_ca_file"] = str(authority.file)
    name, port = f"tls-{is_mutual}", BASE_PORT + 10 * is_mutual
    config = parse_config(
        {
            "app_name": name,
            "drain_timeout_s": 5.0,
            "http": {"port": port, "tls": tls},
            "grpc": {"port": port + 1, "tls": tls},
            "metrics": {"port": port + 2},
            "replica": {"cpus_per_rank": 0.0},
        }
    )
    app = build_app(config, FakeEngineFactory(step_s=0.01))
    serve.run(app, name=name, route_prefix=f"/{name}")
    try:
        clients = Clients(authority, authority.issue("client"), port, is_mutual)
        wait_until(clients.is_ready, 60)
        yield clients
    finally:
        serve.delete(name)
        close_control_plane(name)


def generate(clients, credentials):
    request = pb.GenerateRequest(text=pb.Text(text="hello"))
    request.sampling.max_tokens = 8
    with grpc.secure_channel(clients.grpc_address, credentials) as channel:
        return pb_grpc.InferenceStub(channel).Generate(request, timeout=10).choices[0].text


def test_the_openai_client_streams_and_grpc_answers_with_an_authority_of_our_own(clients):
    with OpenAI(
        base_url=f"{clients.url}/v1",
        api_key="none",
        max_retries=0,
        http_client=httpx.Client(verify=clients.context()),
    ) as openai:
        stream = openai.completions.create(
            model="builtin", prompt="hello", max_tokens=8, temperature=0, stream=True
        )
        text = "".join(choice.text for chunk in stream for choice in chunk.choices)
    assert text
    assert text == generate(clients, clients.credentials())


def test_who_shows_no_certificate_gets_in_only_where_none_is_asked_for(clients):
    context = clients.context(has_certificate=False)
    credentials = clients.credentials(has_certificate=False)
    if clients.is_mutual:
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{clients.url}/health/live", verify=context)
        with pytest.raises(grpc.RpcError) as caught:
            generate(clients, credentials)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    else:
        assert httpx.get(f"{clients.url}/health/live", verify=context).status_code == 200
        assert generate(clients, credentials)


def test_neither_plain_text_nor_an_unknown_authority_is_spoken_to(clients):
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://127.0.0.1:{clients.http_port}/health/live")
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(f"{clients.url}/health/live")
    with grpc.insecure_channel(clients.grpc_address) as channel:
        call = pb_grpc.InferenceStub(channel).ListModels
        with pytest.raises(grpc.RpcError) as caught:
            call(pb.ListModelsRequest(), timeout=10)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


def test_a_client_that_never_finishes_its_handshake_holds_nobody_up(clients):
    idle = [socket.create_connection(("127.0.0.1", clients.http_port)) for _ in range(20)]
    started_s = time.monotonic()
    assert clients.is_ready()
    assert time.monotonic() - started_s < 5
    for connection in idle:
        connection.close()
