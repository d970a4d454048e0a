"""TLS and mutual TLS through the servers that the ingress runs, with certificates of the test."""

import dataclasses
import ssl

import aiohttp
import grpc
import pytest
from typer.testing import CliRunner

from service.api.auth import OpenAuthenticator
from service.api.grpc import build_grpc_server
from service.api.http import build_http_app
from service.api.services import ApiServices
from service.bench.grpc_transport import GrpcTransport
from service.bench.http_transport import HttpTransport
from service.bench.transport import GenerationSettings, TargetError
from service.cli import app
from service.config import parse_config
from service.deployments.listeners import HttpServer, bind_shared
from service.security.client_tls import ClientTls
from service.security.tls import GrpcTls, TlsSettings
from tests.fakes.certificates import Authority, encrypt_key
from tests.fakes.text import make_bench
from workers.errors import ConfigError

SETTINGS = GenerationSettings(0.0, ignore_eos=False)


@dataclasses.dataclass
class Files:
    """ours signs server and client; theirs signs a client that ours does not know."""

    ours: Authority
    theirs: Authority
    server: TlsSettings
    mutual: TlsSettings


@pytest.fixture
def files(tmp_path):
    ours, theirs = Authority(tmp_path, "ours"), Authority(tmp_path, "theirs")
    pair = ours.issue("server")
    server = TlsSettings(certificate_file=pair.certificate, key_file=pair.key)
    mutual = server.model_copy(update={"client_ca_file": ours.file})
    return Files(ours, theirs, server, mutual)


@pytest.fixture
def services(tmp_path):
    return ApiServices(make_bench(tmp_path).models, OpenAuthenticator(), lambda: True, "0", 0)


@pytest.fixture
def client(files):
    """ClientTls that trusts the server; presents a certificate of the authority, if given."""

    def make(authority=None):
        if authority is None:
            return ClientTls(files.ours.file)
        pair = authority.issue("client")
        return ClientTls(files.ours.file, pair.certificate, pair.key)

    return make


class Servers:
    """HTTP and gRPC servers that end with the context."""

    def __init__(self, services, tls):
        self.services, self.tls = services, tls

    async def __aenter__(self):
        listener = bind_shared("127.0.0.1", 0)
        self.http_at = f"127.0.0.1:{listener.getsockname()[1]}"
        self.http = HttpServer(build_http_app(self.services), 5, 1, self.tls)
        await self.http.start(listener)
        self.grpc, port = build_grpc_server(self.services, "127.0.0.1:0", tls=GrpcTls(self.tls))
        self.grpc_at = f"127.0.0.1:{port}"
        await self.grpc.start()
        return self

    async def __aexit__(self, *_):
        await self.grpc.stop(None)
        await self.http.stop()

    def transports(self, tls):
        return (
            HttpTransport(f"https://{self.http_at}", SETTINGS, tls=tls),
            GrpcTransport(self.grpc_at, SETTINGS, tls=tls),
        )


async def models_served(servers, tls):
    names = []
    for transport in servers.transports(tls):
        try:
            names.append((await transport.connect()).model)
        finally:
            await transport.aclose()
    return names


async def refused(servers, tls):
    for transport in servers.transports(tls):
        with pytest.raises(TargetError):
            await transport.connect()
        await transport.aclose()


@pytest.mark.asyncio
async def test_both_servers_answer_clients_that_trust_their_certificate(services, files, client):
    async with Servers(services, files.server) as servers:
        assert await models_served(servers, client()) == ["tiny", "tiny"]


@pytest.mark.asyncio
async def test_a_client_that_does_not_trust_the_authority_does_not_talk(services, files):
    async with Servers(services, files.server) as servers:
        await refused(servers, ClientTls(files.theirs.file))


@pytest.mark.asyncio
async def test_plain_text_is_refused(services, files):
    async with Servers(services, files.server) as servers:
        async with aiohttp.ClientSession() as session:
            with pytest.raises(aiohttp.ClientError):
                await session.get(f"http://{servers.http_at}/health/live")
        plain = GrpcTransport(servers.grpc_at, SETTINGS)
        with pytest.raises(TargetError):
            await plain.connect()
        await plain.aclose()


@pytest.mark.asyncio
async def test_mutual_tls_lets_in_known_clients_only(services, files, client):
    async with Servers(services, files.mutual) as servers:
        assert await models_served(servers, client(files.ours)) == ["tiny", "tiny"]
        await refused(servers, client())
        await refused(servers, client(files.theirs))


@pytest.mark.asyncio
async def test_versions_before_1_2_are_refused(services, files):
    async with Servers(services, files.server) as servers:
        context = ssl.create_default_context(cafile=files.ours.file)
        context.minimum_version = ssl.TLSVersion.TLSv1
        context.maximum_version = ssl.TLSVersion.TLSv1_1
        async with aiohttp.ClientSession() as session:
            with pytest.raises(aiohttp.ClientError):
                await session.get(f"https://{servers.http_at}/health/live", ssl=context)


def test_files_that_cannot_be_used_are_named(files, tmp_path):
    other = files.ours.issue("other")
    junk = tmp_path / "junk.pem"
    junk.write_text("no certificate")
    for change, message in (
        ({"certificate_file": tmp_path / "absent"}, r"http\.tls\.certificate_file: .*No such file"),
        ({"key_file": tmp_path}, r"http\.tls\.key_file: .*directory"),
        ({"key_file": other.key}, r"http\.tls: .*mismatch"),
        ({"certificate_file": junk}, r"http\.tls: .*junk\.pem"),
        ({"client_ca_file": junk}, r"http\.tls\.client_ca_file: .*no certificate"),
    ):
        with pytest.raises(ConfigError, match=message):
            files.server.model_copy(update=change).check("http.tls")
    encrypt_key(other, b"password")
    encrypted = TlsSettings(certificate_file=other.certificate, key_file=other.key)
    with pytest.raises(ConfigError, match="encrypted"):
        encrypted.check("grpc.tls")
    files.mutual.check("grpc.tls")


def test_the_configuration_checks_both_servers_before_they_start(files, tmp_path):
    good = files.server.model_dump(mode="json")
    bad = {**good, "key_file": str(tmp_path / "absent")}
    parse_config({"http": {"tls": good}, "grpc": {"tls": good}}).check_files()
    for server in ("http", "grpc"):
        with pytest.raises(ConfigError, match=rf"{server}\.tls\.key_file"):
            parse_config({server: {"tls": bad}}).check_files()


@pytest.mark.parametrize("proxy", ["serve", "haproxy"])
def test_tls_is_not_promised_where_a_proxy_of_ray_listens(files, proxy):
    tls = files.server.model_dump(mode="json")
    with pytest.raises(ConfigError, match="direct"):
        parse_config({"http": {"tls": tls, "proxy": proxy}})


def test_a_client_certificate_and_its_key_come_together(files):
    with pytest.raises(ConfigError, match="needs its key"):
        ClientTls(files.ours.file, certificate_file=files.ours.file)
    with pytest.raises(ConfigError, match="TLS files"):
        ClientTls(files.ours.issue("x").key).to_grpc_credentials()


def test_grpc_credentials_are_made_of_the_files(files):
    assert isinstance(GrpcTls(files.mutual).credentials, grpc.ServerCredentials)


def test_the_benchmark_names_tls_files_that_cannot_be_used(files):
    pair = files.ours.issue("client")
    for arguments in (
        ["--client-certificate-file", str(pair.certificate)],
        ["--ca-file", str(files.ours.file), "--client-key-file", str(pair.key)],
        ["--ca-file", str(pair.key)],
    ):
        done = CliRunner().invoke(app, ["bench", *arguments])
        assert done.exit_code == 2, done.output
