"""A watched folder of adapters: what is put there is served, what is taken away is not."""

import os
import shutil
import threading

import pytest

from service.adapters.folder_look import look_at_subfolder
from service.adapters.folder_words import folder_words
from service.adapters.table import AdapterEntry, AdapterTable
from service.adapters.unmapped import unmapped_adapter
from service.errors import ApiError, ApiErrorCode
from tests.fakes.small_adapters import TAKEN, save
from tests.fakes.watching_ingress import CONFIGURED, Ingress
from workers.adapters.ref import AdapterRef


@pytest.mark.asyncio
async def test_adapters_come_change_and_go_with_their_subfolders(ingress) -> None:
    save(ingress.folder / "sql")
    (ingress.folder / "notes.txt").write_text("no adapter")
    (ingress.folder / "empty").mkdir()
    save(ingress.folder / ".upload")
    await ingress.turns(1)
    assert ingress.names == set()
    await ingress.turns(1)
    assert ingress.names == {"sql"}
    first = ingress.find("sql")
    assert first == unmapped_adapter("sql", ingress.folder / "sql", TAKEN)

    save(ingress.folder / "sql", value=2.0)
    save(ingress.folder / "code")
    await ingress.turns(1)
    assert ingress.find("sql") == first
    await ingress.turns(1)
    assert ingress.find("sql").key != first.key
    assert ingress.names == {"sql", "code"}

    shutil.rmtree(ingress.folder / "sql")
    await ingress.turns(1)
    assert ingress.names == {"sql", "code"}
    await ingress.turns(1)
    assert ingress.names == {"code"}
    assert ingress.board.actions == [
        "load_lora_adapter sql",
        "load_lora_adapter code",
        "load_lora_adapter sql",
        "unload_lora_adapter sql",
    ]
    assert [one.name for one in ingress.board.board.table.entries] == ["code"]


@pytest.mark.asyncio
async def test_names_are_judged_beside_the_event_loop(ingress, monkeypatch) -> None:
    threads = set()

    def judge(*args):
        threads.add(threading.get_ident())
        return folder_words(*args)

    monkeypatch.setattr("service.adapters.folder_watch.folder_words", judge)
    save(ingress.folder / "a")
    await ingress.turns()
    assert ingress.names == {"a"}
    assert threads
    assert threading.get_ident() not in threads


@pytest.mark.asyncio
async def test_files_are_read_when_they_look_otherwise_only(ingress) -> None:
    save(ingress.folder / "a")
    save(ingress.folder / "bad", rank=8)
    await ingress.turns(5)
    assert ingress.disk.read_names == ["a", "bad"]
    assert threading.get_ident() not in ingress.disk.threads
    os.utime(ingress.folder / "a" / "adapter_config.json", ns=(1, 1))
    table = ingress.board.board.table
    await ingress.turns(5)
    assert ingress.disk.read_names == ["a", "bad", "a"]
    # The contents are the same: there is nothing to say.
    assert ingress.board.board.table is table


@pytest.mark.asyncio
async def test_what_is_being_written_is_not_served_half(ingress) -> None:
    whole = save(ingress.folder / "a")
    await ingress.turns()
    served = ingress.find("a")
    weights = ingress.folder / "a" / "adapter_model.safetensors"
    save(ingress.folder / "new" / "inner", value=3.0)
    data = (ingress.folder / "new" / "inner" / "adapter_model.safetensors").read_bytes()
    for num_bytes in range(0, len(data), 40):
        weights.write_bytes(data[:num_bytes])
        await ingress.turns(1)
        assert ingress.find("a") == served
    assert ingress.disk.read_names == ["a"]
    # Who writes rests halfway: it is of no use, and what was served stays.
    await ingress.turns(2)
    assert (ingress.find("a"), ingress.metrics.num_refusals) == (served, 1)
    weights.write_bytes(data)
    await ingress.turns()
    assert ingress.find("a").key == unmapped_adapter("a", ingress.folder / "a", TAKEN).key
    assert ingress.find("a").folder == whole


@pytest.mark.asyncio
async def test_files_that_change_while_they_are_read_are_not_taken(ingress) -> None:
    save(ingress.folder / "a")
    read = ingress.disk.read

    def read_and_change(name, folder, info):
        found = read(name, folder, info)
        if len(ingress.disk.read_names) == 1:
            save(folder, value=2.0)
        return found

    ingress.watch._reader._read_files = read_and_change
    await ingress.turns(2)
    assert ingress.names == set()
    await ingress.turns(2)
    assert ingress.find("a") == unmapped_adapter("a", ingress.folder / "a", TAKEN)


@pytest.mark.asyncio
async def test_a_replacement_of_equal_size_and_time_is_seen(ingress, tmp_path) -> None:
    for name, value in (("a", 1.0), ("new", 2.0)):
        save(tmp_path / name, value=value)
        for file in (tmp_path / name).iterdir():
            os.utime(file, ns=(1, 1))
    (tmp_path / "a").rename(ingress.folder / "a")
    await ingress.turns()
    first = ingress.find("a")
    for file in (tmp_path / "new").iterdir():
        file.rename(ingress.folder / "a" / file.name)
    await ingress.turns()
    assert ingress.find("a").key != first.key


def test_a_look_tells_files_apart_that_differ_in_nothing_but_when_or_which(tmp_path) -> None:
    save(tmp_path / "a")
    config = tmp_path / "a" / "adapter_config.json"
    first = look_at_subfolder(tmp_path / "a")
    found = config.stat()
    config.chmod(0o600)  # changes the inode, not the contents
    os.utime(config, ns=(found.st_atime_ns, found.st_mtime_ns))
    assert look_at_subfolder(tmp_path / "a") != first
    size, mtime_ns, ctime_ns, inode = look_at_subfolder(tmp_path / "a").files[0]
    changed = config.stat()
    assert (size, mtime_ns) == (found.st_size, found.st_mtime_ns)
    assert (ctime_ns, inode) == (changed.st_ctime_ns, changed.st_ino)


@pytest.mark.asyncio
async def test_names_of_others_are_left_out_with_one_line(ingress, tmp_path, warnings) -> None:
    for name in ("tiny", "other", "fixed", "loaded", "elsewhere", "-dash", "free"):
        save(ingress.folder / name)
    own = save(tmp_path / "own", value=5.0)
    await ingress.control.load("tiny", "loaded", own, "me", in_place=False)
    await ingress.control.load("other", "elsewhere", own, "me", in_place=False)
    await ingress.turns(4)
    assert ingress.names == {"free", "loaded"}
    assert ingress.find("loaded").folder == own
    assert ingress.find("fixed") == CONFIGURED
    told = {line.split("'")[1]: line for line in warnings()}
    assert len(warnings()) == len(told) == 6
    assert "a model is called so" in told["tiny"]
    assert "engine.lora" in told["fixed"]
    assert "a call has loaded" in told["elsewhere"]
    # When the call's adapter goes, the folder's has the name.
    await ingress.control.unload("tiny", "loaded", "me")
    await ingress.turns(1)
    assert ingress.find("loaded").folder == str(ingress.folder / "loaded")
    # And a call may take it again.
    await ingress.control.load("tiny", "loaded", own, "me", in_place=True)
    shutil.rmtree(ingress.folder / "loaded")
    await ingress.turns(3)
    assert ingress.find("loaded").folder == own


@pytest.mark.asyncio
async def test_what_a_call_unloads_stays_so_until_its_files_change(ingress) -> None:
    save(ingress.folder / "a")
    await ingress.turns()
    await ingress.control.unload("", "a", "me")
    await ingress.turns(3)
    assert ingress.names == set()
    # Another ingress watches on.
    heir = Ingress(ingress.folder, ingress.board)
    await heir.control.take(ingress.board.board.table)
    await heir.turns(3)
    assert heir.names == set()
    save(ingress.folder / "a", value=2.0)
    await heir.turns()
    assert heir.names == {"a"}
    await heir.control.unload("", "a", "me")
    shutil.rmtree(ingress.folder / "a")
    await heir.turns()
    assert ingress.board.board.table.entries == ()


@pytest.mark.asyncio
async def test_links_lead_to_the_folder_that_engines_read(ingress, tmp_path) -> None:
    for version, value in (("v1", 1.0), ("v2", 2.0)):
        save(tmp_path / version, value=value)
        link = tmp_path / "link"
        link.symlink_to(tmp_path / version)
        link.rename(ingress.folder / "a")
        await ingress.turns()
        assert ingress.find("a").folder == str(tmp_path / version)
    (ingress.folder / "circle").symlink_to("circle")
    (ingress.folder / "dangling").symlink_to("nowhere")
    await ingress.turns()
    assert ingress.names == {"a"}


@pytest.mark.asyncio
async def test_only_who_has_the_lease_looks_and_two_say_nothing_twice(ingress) -> None:
    save(ingress.folder / "a")
    ingress.board.is_holder = False
    await ingress.turns(3)
    assert (ingress.names, ingress.disk.read_names) == (set(), [])
    ingress.board.is_holder = True
    second = Ingress(ingress.folder, ingress.board)
    await ingress.turns()
    await second.turns()  # it was not told yet what the first one said
    assert ingress.board.actions == ["load_lora_adapter a"]
    assert ingress.find("a") == second.find("a")
    await second.turns(2)
    assert ingress.board.actions == ["load_lora_adapter a"]


@pytest.mark.asyncio
async def test_a_call_that_comes_between_wins(ingress, tmp_path) -> None:
    """The watcher decides by a table that is older than the call."""
    save(ingress.folder / "a")
    own = AdapterRef("a", "/own", "own")
    await ingress.turns(1)
    ingress.board.board.set([AdapterEntry("other", "a", own)], AdapterTable())
    await ingress.turns(3)
    assert ingress.names == set()
    assert ingress.board.actions == []


@pytest.mark.asyncio
async def test_before_a_replica_was_seen_nothing_is_judged(ingress) -> None:
    save(ingress.folder / "a")
    ingress.info_error = ApiError(ApiErrorCode.UNAVAILABLE, "no replica")
    await ingress.turns(3)
    assert ingress.disk.read_names == []
    ingress.info_error = None
    await ingress.turns()
    assert ingress.names == {"a"}


@pytest.mark.asyncio
async def test_a_name_that_the_configuration_has_now_is_no_line_of_the_table(ingress) -> None:
    """A new deployment with the registry, and the folder, of the one before."""
    save(ingress.folder / "fixed")
    adapter = unmapped_adapter("fixed", ingress.folder / "fixed", TAKEN)
    said = AdapterEntry("tiny", "fixed", adapter, folder_key=adapter.key)
    await ingress.control.take(ingress.board.board.set([said], AdapterTable()))
    await ingress.turns()
    assert ingress.board.board.table.entries == ()
    assert ingress.find("fixed") == CONFIGURED
