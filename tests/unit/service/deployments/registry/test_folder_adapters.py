"""What watched folders say to the registry: once, in the audit log, and after all others."""

import json

import pytest

from service.adapters.lease import FolderClaim
from service.adapters.table import AdapterEntry, AdapterTable
from service.deployments.control_plane import REGISTRY_EXPIRE_AFTER_S, RegistryActor
from service.deployments.registry import ReplicaRegistry
from workers.adapters.ref import AdapterRef

BY = "folder of m at ingress i"


def entry(name, key, model="m"):
    return AdapterEntry(model, name, AdapterRef(name, f"/{name}", key), folder_key=key)


@pytest.mark.asyncio
async def test_a_folders_words_are_audited_where_they_count(capsys) -> None:
    registry = RegistryActor()
    known = AdapterTable()
    table = await registry.set_folder_adapters([entry("a", "1"), entry("b", "1")], known, BY)
    assert {one.name for one in table.entries} == {"a", "b"}
    # Of one that was not told yet what is said already, only what is new counts.
    again = await registry.set_folder_adapters([entry("a", "2"), entry("c", "1")], known, BY)
    assert again.find("m", "a") == entry("a", "1")
    gone = AdapterEntry("m", "a", None)
    assert (await registry.set_folder_adapters([gone], again, BY)).find("m", "a") is None
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [(line["action"], line["by"]) for line in lines] == [
        ("load_lora_adapter a", BY),
        ("load_lora_adapter b", BY),
        ("load_lora_adapter c", BY),
        ("unload_lora_adapter a", BY),
    ]
    assert (await registry.watch(0, 0.0)).adapters.version > again.version


@pytest.mark.asyncio
async def test_two_models_folders_do_not_share_a_name() -> None:
    registry, known = RegistryActor(), AdapterTable()
    await registry.set_folder_adapters([entry("a", "1", "m")], known, BY)
    table = await registry.set_folder_adapters([entry("a", "1", "n")], known, BY)
    assert table.entries == (entry("a", "1", "m"),)


@pytest.mark.asyncio
async def test_a_registry_that_knows_nothing_yet_lets_nobody_watch() -> None:
    registry = RegistryActor()
    assert not (await registry.lease_folder(FolderClaim("m", "i", "n", 10.0))).has_it
    now_s = [0.0]
    registry._registry = ReplicaRegistry(REGISTRY_EXPIRE_AFTER_S, lambda: now_s[0])
    now_s[0] = REGISTRY_EXPIRE_AFTER_S
    assert (await registry.lease_folder(FolderClaim("m", "i", "n", 10.0))).has_it
    assert not (await registry.lease_folder(FolderClaim("m", "j", "n", 10.0))).has_it


@pytest.mark.asyncio
async def test_what_a_predecessor_knew_is_learnt_before_a_folder_counts() -> None:
    before = await RegistryActor().set_folder_adapters([entry("a", "1")], AdapterTable(), BY)
    registry = RegistryActor()
    table = await registry.set_folder_adapters([entry("b", "1")], before, BY)
    assert {one.name for one in table.entries} == {"a", "b"}
