"""A watched folder of adapters with something wrong in it, or with the folder itself."""

import asyncio
import os
import shutil

import pytest

from service.adapters.files import configured_adapters
from service.adapters.lease import FolderLease
from service.errors import ApiError, ApiErrorCode
from tests.fakes.small_adapters import save
from tests.fakes.watching_ingress import Ingress
from workers.errors import AdapterError, ConfigError


@pytest.mark.asyncio
async def test_a_bad_subfolder_is_told_once_a_content_and_disturbs_no_other(
    ingress, warnings
) -> None:
    save(ingress.folder / "bad", rank=8)
    save(ingress.folder / "good")
    await ingress.turns(4)
    assert ingress.names == {"good"}
    assert ingress.metrics.num_refusals == 1
    (told,) = warnings()
    assert "'bad' cannot be served" in told
    assert "has rank 8, max_lora_rank is 4" in told
    (ingress.folder / "bad" / "adapter_config.json").write_text("{")
    await ingress.turns(3)
    assert ingress.metrics.num_refusals == 2
    save(ingress.folder / "bad")
    await ingress.turns()
    assert ingress.names == {"good", "bad"}


@pytest.mark.asyncio
async def test_what_nobody_foresaw_is_a_refusal_with_its_trace(ingress, warnings) -> None:
    save(ingress.folder / "bad")
    save(ingress.folder / "good")
    read = ingress.disk.read

    def read_or_fail(name, folder, info):
        if name == "bad":
            raise RecursionError("too deep")
        return read(name, folder, info)

    ingress.watch._reader._read_files = read_or_fail
    await ingress.turns(4)
    assert (ingress.names, ingress.metrics.num_refusals) == ({"good"}, 1)
    (told,) = warnings()
    assert "'bad' cannot be served: reading it failed: RecursionError: too deep" in told
    assert "Traceback" in told
    assert "read_or_fail" in told
    os.utime(ingress.folder / "bad" / "adapter_config.json", ns=(1, 1))
    await ingress.turns(4)
    assert ingress.metrics.num_refusals == len(warnings()) == 2


@pytest.mark.asyncio
async def test_no_error_ends_a_watch(ingress, caplog) -> None:
    save(ingress.folder / "a")
    ingress.disk.look_error = ValueError("of no file system")
    task = asyncio.create_task(ingress.watch.run())
    async with asyncio.timeout(10.0):
        while not caplog.records:
            await asyncio.sleep(0.01)
    assert caplog.records[0].exc_info[1] is ingress.disk.look_error
    ingress.disk.look_error = None
    async with asyncio.timeout(10.0):
        while not ingress.names:
            await asyncio.sleep(0.01)
    task.cancel()


@pytest.mark.asyncio
async def test_trouble_of_the_file_system_is_tried_again_and_told_once(ingress, warnings) -> None:
    save(ingress.folder / "a")
    ingress.disk.read_error = AdapterError("adapter_model.safetensors cannot be read: I/O error")
    ingress.disk.read_error.__cause__ = OSError(5, "I/O error")
    await ingress.turns(4)
    assert (ingress.names, ingress.metrics.num_refusals) == (set(), 1)
    assert len(warnings()) == 1
    ingress.disk.read_error = None
    await ingress.turns(1)
    assert ingress.names == {"a"}


@pytest.mark.asyncio
async def test_a_folder_that_cannot_be_read_takes_nothing_away(ingress, warnings) -> None:
    save(ingress.folder / "a")
    await ingress.turns()
    ingress.disk.look_error = OSError(116, "Stale file handle")
    await ingress.turns(3)
    assert ingress.names == {"a"}
    ingress.disk.look_error = None
    shutil.move(ingress.folder / "a", ingress.folder.parent / "a")
    ingress.disk.device = -1  # not mounted: another file system, and empty
    await ingress.turns(3)
    assert ingress.names == {"a"}
    shutil.move(ingress.folder.parent / "a", ingress.folder / "a")
    await ingress.turns(3)
    assert ingress.names == {"a"}
    assert [line.rpartition(": ")[2] for line in warnings()] == [
        "Stale file handle",
        "its file system is not mounted",
        "engine.lora_folder of tiny can be read again",
    ]
    assert ingress.disk.read_names == ["a"]


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.asyncio
async def test_who_watches_next_unloads_nothing_of_a_file_system_that_is_gone(
    ingress, warnings, is_known
) -> None:
    save(ingress.folder / "a")
    await ingress.turns()
    if not is_known:  # another node's
        ingress.board.device = None
    heir = Ingress(ingress.folder, ingress.board)
    await heir.control.take(ingress.board.board.table)
    shutil.move(ingress.folder / "a", ingress.folder.parent / "a")
    heir.disk.device = -1
    await heir.turns(4)
    assert heir.names == {"a"}
    (told,) = warnings()
    assert ("is not mounted" in told, "nobody on this node" in told) == (is_known, not is_known)
    shutil.move(ingress.folder.parent / "a", ingress.folder / "a")
    heir.disk.device = None
    await heir.turns(3)
    assert heir.names == {"a"}
    assert "can be read again" in warnings()[1]
    shutil.rmtree(ingress.folder / "a")
    await heir.turns()
    assert (heir.names, len(warnings())) == (set(), 2)


@pytest.mark.asyncio
async def test_who_watches_next_believes_an_empty_folder_of_the_same_file_system(
    ingress, warnings
) -> None:
    save(ingress.folder / "a")
    await ingress.turns(3)
    heir = Ingress(ingress.folder, ingress.board)
    await heir.control.take(ingress.board.board.table)
    shutil.rmtree(ingress.folder / "a")
    await heir.turns()
    assert (heir.names, warnings()) == (set(), [])


@pytest.mark.asyncio
async def test_a_subfolder_that_cannot_be_looked_at_keeps_what_is_served(
    ingress, monkeypatch
) -> None:
    save(ingress.folder / "a")
    await ingress.turns()

    def fail(file):
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr("service.adapters.folder_look._look_at_file", fail)
        await ingress.turns(3)
    assert (ingress.names, ingress.metrics.num_refusals) == ({"a"}, 1)


@pytest.mark.asyncio
async def test_names_that_no_message_can_hold_are_refused(ingress, tmp_path, warnings) -> None:
    odd = tmp_path / os.fsdecode(b"odd\xff")
    save(odd)
    (ingress.folder / "linked").symlink_to(odd)
    save(ingress.folder / odd.name)
    save(ingress.folder / "good")
    await ingress.turns(4)
    assert ingress.names == {"good"}
    assert ingress.metrics.num_refusals == 2
    assert all("no UTF-8" in line and line.encode() for line in warnings())
    with pytest.raises(ApiError, match="no UTF-8"):
        await ingress.control.load(
            "tiny", "called", str(ingress.folder / "linked"), "me", in_place=False
        )
    with pytest.raises(ConfigError, match="no UTF-8"):
        configured_adapters({"said": str(ingress.folder / "linked")}, 4)


@pytest.mark.asyncio
async def test_a_registry_that_does_not_answer_ends_no_watch(ingress, warnings) -> None:
    save(ingress.folder / "a")
    answers = [ApiError(ApiErrorCode.UNAVAILABLE, "the registry does not answer")]

    async def lease_folder(model, for_s, device):
        if answers:
            raise answers.pop()
        return FolderLease(has_it=True)

    ingress.board.lease_folder = lease_folder
    task = asyncio.create_task(ingress.watch.run())
    while not ingress.names:
        await asyncio.sleep(0.01)
    task.cancel()
    assert "the registry does not answer" in warnings()[0]
