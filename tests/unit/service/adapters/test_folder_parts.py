"""A watched folder of adapters, part by part: reader, shelf, board and setting."""

import pytest

from service.adapters.files import watched_folder
from service.adapters.folder_reader import MAX_READS, FolderReader
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
    after = board.set(AdapterEntry("m", "a", ref), before)
    assert not board.is_known("a", before)
    assert board.is_known("a", after)
    assert board.is_known("b", before)


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
