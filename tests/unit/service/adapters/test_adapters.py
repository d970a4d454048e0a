"""Adapters by name over HTTP and gRPC, loaded and unloaded while serving."""

import dataclasses
from types import SimpleNamespace

import grpc
import httpx
import msgspec
import pytest
import pytest_asyncio
from prometheus_client import CollectorRegistry

from service.adapters.control import AdapterControl
from service.adapters.files import configured_adapters
from service.adapters.served import ServedAdapters
from service.adapters.shelf import AdapterShelf
from service.adapters.table import AdapterBoard, AdapterEntry, AdapterTable
from service.api.auth import make_authenticator
from service.api.grpc import build_grpc_server
from service.api.http import build_http_app
from service.api.services import AdminServices, ApiServices
from service.config import parse_config
from service.errors import ApiError, ApiErrorCode
from service.handler.directory import ModelDirectory
from service.observability.adapter_metrics import MAX_ADAPTER_LABELS, OTHERS, AdapterMetrics
from service.proto import inference_pb2 as pb
from service.proto import inference_pb2_grpc as pb_grpc
from service.security.admin import AdminGate
from tests.fakes.backend import MODEL_INFO, make_failure
from tests.fakes.callers import callers_of
from tests.fakes.small_adapters import TAKEN, LocalBoard, save
from tests.fakes.text import make_bench
from workers.adapters.ref import AdapterRef
from workers.errors import ConfigError, ErrorCode

INFO = msgspec.structs.replace(MODEL_INFO, adapters=TAKEN)
KEY, ADMIN = "client-key", "admin-key"
CLIENT = {"authorization": f"Bearer {KEY}"}
OPERATOR = {"authorization": f"Bearer {ADMIN}"}


class Served:
    """One model with one adapter, "sql", that its configuration names."""

    def __init__(self, tmp_path, info=INFO):
        self.bench = make_bench(tmp_path / "model", info=info)
        self.registry = CollectorRegistry()
        shelf = AdapterShelf("tiny", configured_adapters({"sql": save(tmp_path / "sql")}, 4))
        self.board = LocalBoard()
        self.control = AdapterControl(
            {"tiny": shelf}, lambda name: self.bench.backend.info.adapters, self.board
        )
        adapters = ServedAdapters(
            shelf,
            self.bench.handler,
            self.bench.backend,
            lambda: True,
            AdapterMetrics(self.registry),
        )
        served = dataclasses.replace(self.bench.served, adapters=adapters)
        self.directory = ModelDirectory([served], self.bench.handler.limits, self.bench.metrics)

    def services(self, has_admin=True):
        operators = AdminServices(AdminGate([ADMIN]), self.control, {}, self.board.audit)
        admin = operators if has_admin else None
        keys = make_authenticator(callers_of(KEY))
        return ApiServices(self.directory, keys, lambda: True, "0", 1_700_000_000, admin=admin)

    @property
    def last_adapter(self):
        return self.bench.backend.requests[-1].adapter


@pytest.fixture
def served(tmp_path):
    return Served(tmp_path)


def client_of(services):
    transport = httpx.ASGITransport(app=build_http_app(services))
    return httpx.AsyncClient(transport=transport, base_url="http://tessera", headers=CLIENT)


@pytest_asyncio.fixture
async def client(served):
    async with client_of(served.services()) as client:
        yield client


async def complete(client, model):
    return await client.post(
        "/v1/completions", json={"model": model, "prompt": "hello", "max_tokens": 4}
    )


async def load(client, name, folder, headers=OPERATOR, **more):
    body = {"lora_name": name, "lora_path": folder, **more}
    return await client.post("/v1/load_lora_adapter", json=body, headers=headers)


async def unload(client, name):
    return await client.post("/v1/unload_lora_adapter", json={"lora_name": name}, headers=OPERATOR)


async def names_of(client):
    data = (await client.get("/v1/models")).json()["data"]
    return {card["id"]: card["parent"] for card in data}


@pytest.mark.asyncio
async def test_a_request_names_an_adapter_as_it_names_a_model(served, client) -> None:
    for model, adapter in (("sql", "sql"), ("tiny", None), ("", None)):
        reply = await complete(client, model)
        assert reply.status_code == 200
        assert reply.json()["model"] == (adapter or "tiny")
        assert getattr(served.last_adapter, "name", None) == adapter
    missing = await complete(client, "nobody")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
    chat = {"model": "sql", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    assert (await client.post("/v1/chat/completions", json=chat)).json()["model"] == "sql"
    assert served.last_adapter.name == "sql"
    assert await names_of(client) == {"tiny": None, "sql": "tiny"}
    assert (await client.get("/v1/models/sql")).json()["parent"] == "tiny"


@pytest.mark.asyncio
async def test_adapters_come_and_go_while_requests_are_served(served, client, tmp_path) -> None:
    reply = await load(client, "code", save(tmp_path / "code"))
    assert reply.status_code == 200
    assert reply.text == "Success: LoRA adapter 'code' added successfully."
    assert (await complete(client, "code")).json()["model"] == "code"
    first = served.last_adapter

    again = await load(client, "code", save(tmp_path / "code"))
    assert again.status_code == 400
    assert "load_inplace" in again.json()["error"]["message"]
    other = save(tmp_path / "other", rank=3)
    assert (await load(client, "code", other, load_inplace=True)).status_code == 200
    await complete(client, "code")
    assert served.last_adapter.key != first.key

    for name in ("code", "sql"):
        reply = await unload(client, name)
        assert reply.text == f"Success: LoRA adapter '{name}' removed successfully."
        assert (await complete(client, name)).status_code == 404
    assert (await unload(client, "code")).status_code == 404
    assert await names_of(client) == {"tiny": None}
    assert served.board.actions == [
        "load_lora_adapter code",
        "load_lora_adapter code",
        "unload_lora_adapter code",
        "unload_lora_adapter sql",
    ]


@pytest.mark.asyncio
async def test_what_cannot_be_served_is_refused_when_it_is_loaded(client, tmp_path) -> None:
    for name, folder, message in (
        ("tiny", save(tmp_path / "one"), "a model is called 'tiny'"),
        ("-", save(tmp_path / "one"), "a name is"),
        ("one", str(tmp_path / "nowhere"), "there is no adapter_config.json"),
        ("one", "~nobody-of-this-name/x", "the folder cannot be found"),
        ("one", "a\0b", "the folder cannot be found"),
        ("one", save(tmp_path / "large", rank=8), "has rank 8, max_lora_rank is 4"),
    ):
        reply = await load(client, name, folder)
        assert reply.status_code == 400
        assert message in reply.json()["error"]["message"]
    unknown = await load(client, "one", save(tmp_path / "one"), model="nobody")
    assert unknown.status_code == 404


@pytest.mark.asyncio
async def test_only_operators_with_a_key_of_their_own_load_adapters(
    served, client, tmp_path
) -> None:
    folder = save(tmp_path / "one")
    for headers in (CLIENT, {"authorization": ""}, {"authorization": f"Basic {ADMIN}"}):
        reply = await load(client, "one", folder, headers)
        assert (reply.status_code, reply.json()["error"]["code"]) == (401, "invalid_api_key")
    async with client_of(served.services(has_admin=False)) as without:
        assert (await load(without, "one", folder)).status_code == 404
    assert (await client.get("/v1/models", headers=OPERATOR)).status_code == 401


@pytest.mark.asyncio
async def test_a_model_without_slots_takes_none(tmp_path) -> None:
    served = Served(tmp_path, MODEL_INFO)
    async with client_of(served.services()) as client:
        reply = await load(client, "one", save(tmp_path / "one"))
    assert reply.status_code == 400
    assert "engine.max_loras" in reply.json()["error"]["message"]


@pytest.mark.asyncio
async def test_grpc_names_adapters_too(served) -> None:
    server, port = build_grpc_server(served.services(), "127.0.0.1:0")
    await server.start()
    metadata = (("authorization", f"Bearer {KEY}"),)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = pb_grpc.InferenceStub(channel)
        models = (await stub.ListModels(pb.ListModelsRequest(), metadata=metadata)).models
        request = pb.GenerateRequest(model="sql", text=pb.Text(text="hello"))
        reply = await stub.Generate(request, metadata=metadata)
    await server.stop(None)
    assert {model.name: model.parent for model in models} == {"tiny": "", "sql": "tiny"}
    assert (reply.model, served.last_adapter.name) == ("sql", "sql")


@pytest.mark.asyncio
async def test_an_engines_refusals_are_typed(served, client) -> None:
    for code, status in ((ErrorCode.ADAPTER_UNAVAILABLE, 404), (ErrorCode.QUEUE_FULL, 429)):
        served.bench.backend.script = lambda request, code=code: [make_failure(request, code, "no")]
        assert (await complete(client, "sql")).status_code == status


@pytest.mark.asyncio
async def test_requests_are_counted_by_adapter_within_bounds(served, client) -> None:
    await complete(client, "sql")
    await complete(client, "tiny")
    sample = served.registry.get_sample_value
    assert sample("tessera_adapter_requests_finished_total", {"adapter": "sql"}) == 1
    assert sample("tessera_adapter_output_tokens_total", {"adapter": "sql"}) > 0
    assert len(served.bench.metrics.named("finished")) == 2
    registry = CollectorRegistry()
    metrics = AdapterMetrics(registry)
    for index in range(MAX_ADAPTER_LABELS + 5):
        metrics.of(f"adapter-{index}", served.bench.metrics)
    labels = {one.labels["adapter"] for family in registry.collect() for one in family.samples}
    assert len(labels) == MAX_ADAPTER_LABELS + 1
    assert OTHERS in labels


@pytest.mark.asyncio
async def test_a_registry_that_starts_anew_learns_what_was_loaded(served, tmp_path) -> None:
    await served.control.load("", "one", save(tmp_path / "one"), "me", in_place=False)
    table = served.board.board.table
    served.board.board = AdapterBoard()
    await served.control.take(served.board.board.table)
    assert served.board.board.table == table
    assert served.directory.find("one").parent == "tiny"
    # Or by the next call, whichever comes first.
    served.board.board = AdapterBoard()
    await served.control.load("", "two", save(tmp_path / "two"), "me", in_place=False)
    assert {one.name for one in served.board.board.table.entries} == {"one", "two"}
    assert served.directory.find("one").parent == "tiny"


def test_many_adapters_are_listed_at_once_and_none_is_kept_that_is_gone() -> None:
    looked_at = 0

    class Shelf(AdapterShelf):
        def __iter__(self):
            nonlocal looked_at
            for one in super().__iter__():
                looked_at += 1
                yield one

    refs = {f"{index}": AdapterRef(f"{index}", "/a", f"{index}") for index in range(300)}
    shelf = Shelf("m", refs)
    inner = SimpleNamespace(over=lambda backend, metrics: backend, metrics=None)
    counted = SimpleNamespace(of=lambda name, metrics: metrics)
    served = ServedAdapters(shelf, inner, None, lambda: True, counted)
    assert [one.name for one in served] == list(refs)
    assert looked_at <= 2 * len(refs)
    for index in range(1000):
        ref = AdapterRef("0", "/a", f"later-{index}")
        shelf.take(AdapterTable(index, (AdapterEntry("m", "0", ref),)))
        assert served.find("0").name == "0"
    assert len(served._made) <= 2 * len(refs)


@pytest.mark.asyncio
async def test_adapters_that_came_and_went_are_no_entries_for_good(served, tmp_path) -> None:
    """Every view of the registry has all of them."""
    folder = save(tmp_path / "one")
    for index in range(3):
        await served.control.load("", f"one-{index}", folder, "me", in_place=False)
        await served.control.unload("", f"one-{index}", "me")
    assert served.board.board.table.entries == ()
    await served.control.unload("", "sql", "me")
    (entry,) = served.board.board.table.entries
    assert (entry.name, entry.adapter) == ("sql", None)
    with pytest.raises(ApiError):
        served.directory.find("sql")
    await served.control.load("", "sql", folder, "me", in_place=False)
    assert served.directory.find("sql").name == "sql"


def test_the_newer_word_on_a_name_counts() -> None:
    board, ref = AdapterBoard(lambda: 7), AdapterRef("a", "/a", "k")
    first = board.set([AdapterEntry("m", "a", ref)], AdapterTable())
    gone = AdapterEntry("m", "a", None, is_configured=True)
    second = board.set([gone], AdapterTable())
    assert second.version > first.version
    assert second.entries == (gone,)
    assert not board.restore(first)
    shelf = AdapterShelf("m", {"a": ref})
    shelf.take(second)
    assert shelf.find("a") is None
    shelf.take(AdapterTable())
    assert list(shelf) == [ref]


@pytest.mark.asyncio
async def test_several_models_have_adapters_of_their_own(tmp_path) -> None:
    shelves = {name: AdapterShelf(name, {}) for name in ("a", "b")}
    control = AdapterControl(shelves, lambda name: TAKEN, LocalBoard())
    folder = save(tmp_path / "one")
    with pytest.raises(ApiError, match="choose one of a, b"):
        await control.load("", "one", folder, "me", in_place=False)
    await control.load("b", "one", folder, "me", in_place=False)
    assert (shelves["a"].find("one"), shelves["b"].find("one").name) == (None, "one")
    with pytest.raises(ApiError, match="'b' has an adapter 'one'"):
        await control.load("a", "one", folder, "me", in_place=False)
    with pytest.raises(ApiError) as error:
        await control.unload("a", "one", "me")
    assert error.value.code is ApiErrorCode.MODEL_NOT_FOUND
    await control.unload("", "one", "me")
    assert shelves["b"].find("one") is None


def test_the_configuration_names_folders_and_keys(tmp_path) -> None:
    folder = save(tmp_path / "one")
    config = parse_config(
        {
            "engine": {"max_loras": 4, "lora": {"one": folder}},
            "auth": {"admin_api_keys": "a, b"},
        }
    )
    assert config.auth.load_admin_keys() == ("a", "b")
    (model,) = config.served_models()
    assert model.engine.lora == {"one": folder}
    assert model.engine.to_engine_config().max_loras == 4
    for broken, message in (
        ({"engine": {"lora": {"one": folder}}}, "set max_loras"),
        ({"engine": {"max_loras": 2, "lora": {"builtin": folder}}}, "must have different names"),
        ({"engine": {"max_loras": 8, "max_cpu_loras": 4}}, "max_cpu_loras=4"),
        ({"engine": {"max_lora_rank": 512}}, r"\[1, 256\]"),
        ({"auth": {"admin_api_keys": ""}}, "an API key is empty"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse_config(broken)
    with pytest.raises(ConfigError, match=r"engine\.lora\.two: .*the folder cannot be found"):
        configured_adapters({"two": "~nobody-of-this-name/x"}, 4)
    with pytest.raises(ConfigError, match=r"engine\.lora\.two: .*there is no adapter_config"):
        configured_adapters({"two": str(tmp_path / "nowhere")}, 4)
    with pytest.raises(ConfigError, match=r"engine\.lora\.two: .*rank 8, max_lora_rank is 4"):
        configured_adapters({"two": save(tmp_path / "large", rank=8)}, 4)
