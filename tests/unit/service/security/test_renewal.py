"""Keys and certificates that change on disk count without a start; broken ones change nothing."""

import asyncio
import socket
import ssl

import grpc
import grpc.aio
import pytest

from service.api.auth import OpenAuthenticator
from service.api.grpc import build_grpc_server
from service.api.http import build_http_app
from service.api.key_ring import KeyRing
from service.api.services import ApiServices
from service.config import parse_config
from service.deployments.front_door import FrontDoor
from service.errors import ApiError
from service.proto import inference_pb2 as pb
from service.proto import inference_pb2_grpc as pb_grpc
from service.security.renewal import Renewable, keep_renewed
from service.security.settings import AuthSettings
from tests.fakes.certificates import Authority
from tests.fakes.text import make_bench
from workers.errors import ConfigError

pytestmark = pytest.mark.asyncio


async def test_a_file_is_loaded_when_its_content_changes_and_only_then(tmp_path):
    file, loaded = tmp_path / "file", []
    file.write_text("one")
    renewable = Renewable("setting", [file], file.read_text).into(loaded.append)
    await renewable.renew()
    assert loaded == []
    # As Kubernetes changes a mounted secret: by another file under the name.
    other = tmp_path / "other"
    other.write_text("two")
    other.rename(file)
    await renewable.renew()
    await renewable.renew()
    assert loaded == ["two"]


async def test_what_cannot_be_used_is_logged_once_and_the_next_change_counts(tmp_path, caplog):
    file = tmp_path / "keys"
    file.write_text("first-key")
    auth = AuthSettings(api_key_file=file)
    used = []
    renewable = Renewable("auth.api_key_file", [file], auth.load_keys).into(used.append)
    for broken in ("", "key name=!", None):
        if broken is None:
            file.unlink()
        else:
            file.write_text(broken)
        for _ in range(3):
            await renewable.renew()
    assert used == []
    errors = [line.getMessage() for line in caplog.records if line.levelname == "ERROR"]
    assert len(errors) == 3
    assert all("auth.api_key_file" in line and "first-key" not in line for line in errors)
    file.write_text("second-key")
    await renewable.renew()
    assert [key.key for (key,) in used] == ["second-key"]


async def test_what_could_not_be_read_is_read_as_soon_as_it_can_be(tmp_path, caplog):
    """No file left to open, a disk that is away: the files do not change again by that."""
    file, used, is_away = tmp_path / "file", [], [True] * 3

    def load():
        if is_away:
            is_away.pop()
            raise ConfigError("away")
        return file.read_text()

    file.write_text("one")
    renewable = Renewable("setting", [file], load).into(used.append)
    file.write_text("two")
    for _ in range(5):
        await renewable.renew()
    assert used == ["two"]
    assert [line.levelname for line in caplog.records].count("ERROR") == 1


def ring_of(text, tmp_path):
    file = tmp_path / "keys"
    file.write_text(text)
    return AuthSettings(api_key_file=file).load_keys()


async def test_keys_come_and_go_and_those_that_stay_keep_what_they_have_used(tmp_path):
    limited = "stays name=a requests_per_minute=1\n"
    keys = ring_of(limited + "goes name=b\n", tmp_path)
    ring = KeyRing(keys, lambda: 0.0, salt_prefix_cache=True)
    before = ring.identify("Bearer stays")
    ring.renew(ring_of(limited + "comes name=c\n", tmp_path))
    assert ring.identify("Bearer stays") == before
    assert ring.identify("Bearer goes") is None
    assert ring.identify("Bearer comes").name == "c"
    ring.renew(ring_of("stays name=a requests_per_minute=2\n", tmp_path))
    assert ring.identify("Bearer stays").quota is not before.quota
    assert ring.identify("Bearer stays").cache_salt == before.cache_salt


async def test_a_line_that_is_put_before_others_changes_nothing_of_theirs(tmp_path):
    ring = KeyRing(ring_of("stays\n", tmp_path), lambda: 0.0, salt_prefix_cache=True)
    before = ring.identify("Bearer stays")
    ring.renew(ring_of("# new\ncomes\nstays\n", tmp_path))
    assert ring.identify("Bearer stays") == before
    assert ring.identify("Bearer comes") is not None


async def test_a_line_above_or_another_name_or_range_forgives_nothing(tmp_path):
    limited = "stays requests_per_minute=1"
    ring = KeyRing(ring_of(limited, tmp_path), lambda: 0.0, salt_prefix_cache=True)
    unnamed = ring.identify("Bearer stays")
    unnamed.quota.admit()
    for text, name in (
        (f"new name=b\n{limited}", unnamed.name),
        (f"{limited} name=a", "a"),
        (f"{limited} name=a min_priority=-1", "a"),
    ):
        ring.renew(ring_of(text, tmp_path))
        caller = ring.identify("Bearer stays")
        assert caller.name == name
        with pytest.raises(ApiError, match=f"'{name}'"):
            caller.quota.admit()
    assert -1 in caller.priorities


async def test_keys_change_under_requests(tmp_path):
    """A stream goes on when its key goes; the key's next request is refused."""
    bench = make_bench(tmp_path)
    bench.backend.gate = asyncio.Semaphore(1)
    ring = KeyRing(ring_of("goes\nstays", tmp_path), lambda: 0.0, salt_prefix_cache=True)
    services = ApiServices(bench.models, ring, lambda: True, "0", 0)
    server, port = build_grpc_server(services, "127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = pb_grpc.InferenceStub(channel)
        request = pb.GenerateRequest(text=pb.Text(text="hi"))

        def ask(key):
            return stub.GenerateStream(request, metadata=(("authorization", f"Bearer {key}"),))

        streams = [ask("goes"), ask("stays")]
        for stream in streams:
            first = asyncio.ensure_future(stream.read())
            while not first.done():  # the other stream may have taken what was let through
                bench.backend.gate.release()
                await asyncio.wait([first], timeout=0.05)
        for number in range(50):
            ring.renew(ring_of(f"# {number}\nstays\nnew-{number} name=n", tmp_path))
        late = ask("goes")
        assert await late.code() is grpc.StatusCode.UNAUTHENTICATED
        for _ in range(1000):
            bench.backend.gate.release()
        async with asyncio.timeout(20):
            for stream in streams:
                while await stream.read() is not grpc.aio.EOF:
                    pass
                assert await stream.code() is grpc.StatusCode.OK
    await server.stop(None)


async def test_keys_are_renewed_in_the_background(tmp_path):
    file = tmp_path / "keys"
    file.write_text("old")
    auth = AuthSettings(api_key_file=file)
    ring = KeyRing(auth.load_keys(), lambda: 0.0, salt_prefix_cache=False)
    renewable = Renewable("auth.api_key_file", [file], auth.load_keys).into(ring.renew)
    keeping = asyncio.create_task(keep_renewed([renewable], interval_s=0.02))
    file.write_text("new")
    async with asyncio.timeout(5):
        while ring.identify("Bearer new") is None:
            await asyncio.sleep(0.01)
    assert ring.identify("Bearer old") is None
    keeping.cancel()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Door:
    """A FrontDoor with TLS on both ports; certificates of `authority` lie at the same paths."""

    def __init__(self, tmp_path, authority):
        self.tmp_path = tmp_path
        self.install(authority)
        tls = {"certificate_file": str(tmp_path / "crt"), "key_file": str(tmp_path / "key")}
        self.ports = [free_port() for _ in range(3)]
        http, rpc, metrics = self.ports
        self.config = parse_config(
            {
                "http": {"port": http, "tls": tls},
                "grpc": {"port": rpc, "tls": tls},
                "metrics": {"port": metrics},
            }
        )

    def install(self, authority):
        pair = authority.issue("server")
        (self.tmp_path / "crt").write_bytes(pair.certificate.read_bytes())
        (self.tmp_path / "key").write_bytes(pair.key.read_bytes())

    async def __aenter__(self):
        models = make_bench(self.tmp_path).models
        services = ApiServices(models, OpenAuthenticator(), lambda: True, "0", 0)
        self.door = FrontDoor(self.config)
        await self.door.open(build_http_app(services), services)
        return self

    async def __aexit__(self, *_):
        await self.door.rpc.stop(None)
        await self.door.http.stop()

    async def renew(self):
        for renewable in self.door.renewables:
            await renewable.renew()

    async def connect(self, authority):
        context = ssl.create_default_context(cafile=authority.file)
        return await asyncio.open_connection("127.0.0.1", self.ports[0], ssl=context)

    def channel(self, authority):
        credentials = grpc.ssl_channel_credentials(authority.file.read_bytes())
        own = (("grpc.use_local_subchannel_pool", 1),)
        return grpc.aio.secure_channel(f"127.0.0.1:{self.ports[1]}", credentials, options=own)


async def answers_http(connection):
    reader, writer = connection
    writer.write(b"GET /health/live HTTP/1.1\r\nHost: a\r\n\r\n")
    await writer.drain()
    status = await reader.readuntil(b"}")
    return b" 200 " in status


async def list_models(channel):
    return await pb_grpc.InferenceStub(channel).ListModels(pb.ListModelsRequest(), timeout=5)


async def test_certificates_change_for_new_connections_and_open_ones_go_on(tmp_path):
    old, new = Authority(tmp_path, "old"), Authority(tmp_path, "new")
    async with Door(tmp_path, old) as door:
        connection, channel = await door.connect(old), door.channel(old)
        assert await answers_http(connection)
        await list_models(channel)
        door.install(new)
        await door.renew()
        # What is open goes on, and what comes trusts the new authority only.
        assert await answers_http(connection)
        await list_models(channel)
        assert await answers_http(await door.connect(new))
        with pytest.raises(ssl.SSLError):
            await door.connect(old)
        async with door.channel(new) as fresh, door.channel(old) as stale:
            await list_models(fresh)
            with pytest.raises(grpc.aio.AioRpcError):
                await list_models(stale)
        await channel.close()
        connection[1].close()


async def test_a_certificate_without_its_key_changes_nothing(tmp_path, caplog):
    old, new = Authority(tmp_path, "old"), Authority(tmp_path, "new")
    async with Door(tmp_path, old) as door:
        (tmp_path / "crt").write_bytes(new.issue("half").certificate.read_bytes())
        await door.renew()
        errors = [line.getMessage() for line in caplog.records if line.levelname == "ERROR"]
        assert {line.partition(":")[0] for line in errors} == {"http.tls", "grpc.tls"}
        assert await answers_http(await door.connect(old))
        async with door.channel(old) as channel:
            await list_models(channel)
