"""Weights once per node: who copies, who waits, what is evicted, and what a death leaves behind."""

import errno
import logging
import os
import shutil
from pathlib import Path

import pytest

from tests.fakes.slow_copies import (
    ROOMY,
    lease_and_tell,
    slow_down,
    start_process,
    wait_for,
    write_model,
)
from workers.errors import ConfigError, ModelLoadError
from workers.loading import file_copy, weights_cache
from workers.loading.file_lock import FileLock
from workers.loading.model_files import ModelFiles
from workers.loading.weights_cache import WeightsCache, WeightsLease


def lease(root: Path, folder: Path, max_bytes: int = ROOMY) -> WeightsLease:
    return WeightsCache(root, max_bytes).lease(folder, lambda done, total: None)


def copies_in(root: Path) -> set[str]:
    return {path.name.rpartition("-")[0] for path in root.iterdir() if path.is_dir()}


def size_of(folder: Path) -> int:
    return ModelFiles.of(folder).total_bytes


def test_a_copy_is_whole_and_made_once(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    (folder / "tokenizer.json").write_text("[]")
    (folder / "pytorch_model.bin").write_bytes(b"pickled")
    first, second = (lease(tmp_path / "cache", folder) for _ in range(2))
    assert first.is_copy
    assert first.bytes_awaited == size_of(folder)
    assert (second.folder, second.bytes_awaited) == (first.folder, 0)
    names = {path.name for path in first.folder.iterdir()}
    assert names == {"config.json", "model.safetensors", "tokenizer.json"}
    for name in names:
        assert (first.folder / name).read_bytes() == (folder / name).read_bytes()


def test_processes_that_race_read_one_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_model(tmp_path / "model", 50)
    slow_down(monkeypatch, 0.02)
    work = lease_and_tell(tmp_path / "cache", folder, num_processes=4)
    started = [start_process(work) for _ in range(4)]
    told = [pipe.recv() for _, pipe in started]
    for process, _ in started:
        process.join()
    assert [weights for _, weights, _ in told] == [b"w" * 50] * 4
    assert {awaited for awaited, _, _ in told} == {size_of(folder)}
    assert sum(num_copies for _, _, num_copies in told) == 1


def test_a_killed_copier_leaves_no_copy_and_another_makes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, root = write_model(tmp_path / "model", 400), tmp_path / "cache"
    key = ModelFiles.of(folder).key
    with monkeypatch.context() as slow:
        slow_down(slow, 0.05)
        process, _ = start_process(lease_and_tell(root, folder))
        half = root / f"{key}.partial" / "model.safetensors"
        wait_for(lambda: half.exists() and half.stat().st_size > 3)
        process.kill()
        process.join()
    assert 0 < half.stat().st_size < 400
    assert not (root / key).exists()
    assert (lease(root, folder).folder / "model.safetensors").read_bytes() == b"w" * 400
    assert not half.parent.exists()


def test_a_copy_that_was_made_before_ones_turn_is_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, root = write_model(tmp_path / "model"), tmp_path / "cache"
    try_alone = FileLock.try_alone

    def another_was_faster(lock: FileLock) -> bool:
        monkeypatch.setattr(FileLock, "try_alone", try_alone)
        lease(root, folder)
        return try_alone(lock)

    monkeypatch.setattr(FileLock, "try_alone", another_was_faster)
    assert (lease(root, folder).folder / "model.safetensors").read_bytes() == b"w" * 4096


def test_who_waits_sees_the_progress_of_who_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, root = write_model(tmp_path / "model", 100), tmp_path / "cache"
    total = size_of(folder)
    monkeypatch.setattr(weights_cache, "_POLL_INTERVAL_S", 0.01)
    slow_down(monkeypatch, 0.005)
    process, pipe = start_process(lease_and_tell(root, folder))
    wait_for((root / f"{ModelFiles.of(folder).key}.partial").is_dir)
    seen: list[tuple[int, int]] = []
    WeightsCache(root, ROOMY).lease(folder, lambda done, of: seen.append((done, of)))
    assert pipe.recv()[2] == 1
    process.join()
    assert {of for _, of in seen} == {2 * total}
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert len({done for done, _ in seen if 0 < done < total}) > 5


def test_a_copy_that_gets_its_name_while_it_is_counted_is_not_counted_as_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, root = write_model(tmp_path / "model"), tmp_path / "cache"
    cache, total = WeightsCache(root, ROOMY), size_of(folder)
    copying = FileLock(root / "copy.lock")
    assert copying.try_alone()
    counts = iter((50, 0))

    def count(partial: Path) -> int:
        num_bytes = next(counts)
        if num_bytes == 0:
            shutil.copytree(folder, partial.with_suffix(""))
        return num_bytes

    monkeypatch.setattr(weights_cache, "_size_of", count)
    seen: list[tuple[int, int]] = []
    assert cache.lease(folder, lambda *progress: seen.append(progress)).is_copy
    copying.close()
    assert seen == [(50, 2 * total)]


def test_the_least_recently_used_makes_room(tmp_path: Path) -> None:
    root = tmp_path / "cache"
    a, b, c = (write_model(tmp_path / name) for name in "abc")
    bound = 2 * size_of(a)
    for when, folder in enumerate((a, b), start=1):
        held = lease(root, folder, bound)
        assert held.lock is not None
        os.utime(held.lock.path, (when, when))
        held.lock.close()
    del held
    lease(root, a, bound)
    lease(root, c, bound)
    assert copies_in(root) == {"a", "c"}


def test_what_is_in_use_is_never_evicted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = tmp_path / "cache"
    a, b = write_model(tmp_path / "a"), write_model(tmp_path / "b")
    held = lease(root, a, size_of(a))
    with caplog.at_level(logging.WARNING):
        refused = lease(root, b, size_of(a))
    assert (refused.folder, refused.is_copy) == (b, False)
    assert "do not fit beside" in caplog.text
    assert copies_in(root) == {"a"}
    del held
    assert lease(root, b, size_of(a)).is_copy
    assert copies_in(root) == {"b"}


def test_a_lease_of_a_dead_process_holds_nothing(tmp_path: Path) -> None:
    root = tmp_path / "cache"
    a, b = write_model(tmp_path / "a"), write_model(tmp_path / "b")
    process, pipe = start_process(lease_and_tell(root, a))
    pipe.recv()
    process.join()
    assert lease(root, b, size_of(b)).is_copy
    assert copies_in(root) == {"b"}


@pytest.mark.parametrize("free_bytes", [0, 4000])
def test_a_full_disk_is_read_around_and_said(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    free_bytes: int,
) -> None:
    folder = write_model(tmp_path / "model")
    usage = shutil.disk_usage(tmp_path)._replace(free=free_bytes)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with caplog.at_level(logging.WARNING):
        got = lease(tmp_path / "cache", folder)
    assert got == WeightsLease.of_source(folder)
    assert f"reading {folder} directly" in caplog.text
    assert copies_in(tmp_path / "cache") == set()


def test_a_disk_that_fills_up_meanwhile_is_read_around_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_model(tmp_path / "model")

    def no_space(descriptor: int, data: memoryview) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(file_copy, "_write_all", no_space)
    with caplog.at_level(logging.WARNING):
        got = lease(tmp_path / "cache", folder)
    assert got == WeightsLease.of_source(folder)
    assert "is full" in caplog.text
    assert copies_in(tmp_path / "cache") == set()


def test_other_failures_of_a_copy_are_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_model(tmp_path / "model")

    def broken(descriptor: int, data: memoryview) -> None:
        raise OSError(errno.EIO, "the disk is gone")

    monkeypatch.setattr(file_copy, "_write_all", broken)
    with pytest.raises(ModelLoadError, match="the disk is gone"):
        lease(tmp_path / "cache", folder)
    assert copies_in(tmp_path / "cache") == set()


def test_a_folder_that_changed_is_another_copy(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    old = lease(tmp_path / "cache", folder).folder
    (folder / "model.safetensors").write_bytes(b"v" * 4096)
    os.utime(folder / "model.safetensors", ns=(1, 1))
    new = lease(tmp_path / "cache", folder).folder
    assert new != old
    assert (new / "model.safetensors").read_bytes() == b"v" * 4096


def test_a_folder_that_changes_while_it_is_copied_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_model(tmp_path / "model")
    write = file_copy._write_all

    def edit_and_write(descriptor: int, data: memoryview) -> None:
        os.utime(folder / "config.json", ns=(1, 1))
        write(descriptor, data)

    monkeypatch.setattr(file_copy, "_write_all", edit_and_write)
    with pytest.raises(ModelLoadError, match="was changed while it was copied"):
        lease(tmp_path / "cache", folder)
    assert copies_in(tmp_path / "cache") == set()


def test_a_copy_that_somebody_cut_is_refused_by_name(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    copy = lease(tmp_path / "cache", folder).folder
    (copy / "model.safetensors").write_bytes(b"w")
    with pytest.raises(ModelLoadError, match=f"remove {copy}"):
        lease(tmp_path / "cache", folder)


def test_what_can_never_fit_is_a_wrong_setting(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    with pytest.raises(ConfigError, match="weights_cache_bytes=100 is less than"):
        lease(tmp_path / "cache", folder, 100)


def test_a_place_that_cannot_hold_a_cache_is_a_wrong_setting(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="weights_cache_dir"):
        WeightsCache(tmp_path / "file", ROOMY)


def test_the_way_to_a_folder_does_not_matter(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    (tmp_path / "link").symlink_to(folder)
    assert ModelFiles.of(tmp_path / "link").key == ModelFiles.of(folder).key
    assert ModelFiles.of(folder).key.startswith("model-")
