"""A watched folder of adapters, part by part: reader, shelf, board and setting."""

import copy
import pickle
import sys

import pytest

from service.adapters.files import watched_folder
from service.adapters.folder_reader import MAX_READS, FolderContents, FolderReader
from service.adapters.folder_words import folder_words
from service.adapters.shelf import AdapterShelf
from service.adapters.table import AdapterBoard, AdapterEntry, AdapterTable
from service.config import parse_config
from tests.fakes.small_adapters import TAKEN, save
from tests.fakes.watching_ingress import CONFIGURED
from workers.adapters.ref import AdapterRef
from workers.errors import ConfigError


def test_of_many_new_ones_some_are_read_at_a_time(tmp_path) -> None:
    num_folders = MAX_READS + 3
    for index in range(num_folders):
        save(tmp_path / f"a{index:02}")
    reader = FolderReader(tmp_path)
    assert reader.read(TAKEN) is None
    first, second = reader.read(TAKEN), reader.read(TAKEN)
    assert (len(first.adapters), first.is_whole) == (MAX_READS, False)
    assert (len(second.adapters), second.is_whole) == (num_folders, True)
    assert len(first.kept) == 3


def test_the_configuration_comes_before_what_a_folder_has_left() -> None:
    of_folder = AdapterRef("fixed", "/folder/fixed", "k")
    gone = AdapterEntry("m", "gone", AdapterRef("gone", "/folder/gone", "k"), folder_key="k")
    table = AdapterTable(1, (AdapterEntry("m", "fixed", of_folder, folder_key="k"), gone))
    watched = AdapterShelf("m", {"fixed": CONFIGURED}, has_folder=True)
    unwatched = AdapterShelf("m", {"fixed": CONFIGURED})
    for shelf, names in ((watched, ["fixed", "gone"]), (unwatched, ["fixed"])):
        shelf.take(table)
        assert [one.name for one in shelf] == names
        assert shelf.find("fixed") == CONFIGURED


def test_a_board_knows_who_is_behind() -> None:
    board, ref = AdapterBoard(lambda: 7), AdapterRef("a", "/a", "k")
    before = board.table
    entries = tuple(AdapterEntry("m", name, ref) for name in "ab")
    after = board.set(entries[:1], before)
    assert board.news(entries, before) == entries[1:]
    assert board.news(entries, after) == entries


def test_a_table_finds_what_it_holds_and_travels_without_what_it_derives() -> None:
    ref = AdapterRef("a", "/a", "k")
    entries = tuple(AdapterEntry(model, "a", ref) for model in "mn")
    table = AdapterTable(1, entries)
    num_bytes = len(pickle.dumps(table))
    assert table.find("n", "a") is entries[1]
    assert (table.find("m", "b"), table.of_name("b")) == (None, frozenset())
    assert table.of_name("a") == frozenset(entries)
    assert len(pickle.dumps(table)) == num_bytes
    assert copy.copy(table) == table
    other = AdapterRef("a", "/b", "l")
    gone = table.with_entries(
        [AdapterEntry("m", "a", None), AdapterEntry("n", "a", other)], version=2
    )
    assert gone == AdapterTable(2, (AdapterEntry("n", "a", other),))


def test_thousands_of_names_are_judged_and_set_in_a_time_that_grows_with_their_number() -> None:
    def num_steps(num_names):
        """Lines of code that run."""
        refs = {f"a{i}": AdapterRef(f"a{i}", f"/a{i}", str(i)) for i in range(num_names)}
        contents = FolderContents(refs, frozenset(), {}, is_whole=True)
        shelves = {"m": AdapterShelf("m", {}, has_folder=True)}
        board, num_lines = AdapterBoard(), 0

        def count(frame, event, arg):
            nonlocal num_lines
            num_lines += 1
            return count

        before = sys.gettrace()
        sys.settrace(count)
        try:
            words = folder_words("m", contents, shelves, board.table)
            board.set(board.news(words.entries, board.table), board.table)
            words = folder_words("m", contents, shelves, board.table)
        finally:
            sys.settrace(before)
        assert (words.entries, len(board.table.entries)) == ((), num_names)
        return num_lines

    assert num_steps(800) < 8.5 * num_steps(100)


def test_a_folder_is_a_setting_that_is_judged_at_the_start(tmp_path) -> None:
    engine = {"max_loras": 2, "lora_folder": str(tmp_path), "lora_folder_interval_s": 0.5}
    (model,) = parse_config({"engine": engine}).served_models()
    assert watched_folder(model.engine.lora_folder) == tmp_path
    assert watched_folder(None) is None
    (tmp_path / "link").symlink_to(tmp_path)
    spellings = (
        str(tmp_path),
        f"{tmp_path}/",
        f"{tmp_path}/../{tmp_path.name}",
        f"{tmp_path}/link",
    )
    models = [
        {"a": {"engine": engine}, "b": {"engine": {**engine, "lora_folder": one}}}
        for one in spellings
    ]
    for broken, message in (
        ({"engine": {**engine, "max_loras": 0}}, "lora_folder: .*set max_loras"),
        ({"engine": {**engine, "lora_folder": ""}}, "engine.lora_folder"),
        ({"engine": {**engine, "lora_folder_interval_s": 0}}, "lora_folder_interval_s"),
        ({"engine": {**engine, "lora_folder_interval": 1}}, "no such setting"),
        *(({"models": one}, "different engine.lora_folder") for one in models),
    ):
        with pytest.raises(ConfigError, match=message):
            parse_config(broken)
    (tmp_path / "file").write_text("")
    for stated in (tmp_path / "nowhere", tmp_path / "file"):
        with pytest.raises(ConfigError, match=r"engine\.lora_folder: .*(No such|Not a)"):
            watched_folder(str(stated))
