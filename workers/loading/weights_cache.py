"""Weights once per node: copies of model folders on a local disk, which all processes there share.

In the cache's folder lie: `<key>/`, a complete copy; `<key>.partial/`, one under way or left by a
process that died; `<key>.lock`, shared by all that use the copy; `copy.lock`, held alone by the one
process that copies or evicts. A copy is complete or not there: it gets its name by a rename.

Knows files and locks. Knows no tensor, no rank and no request.
"""

import errno
import logging
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from workers.errors import ConfigError, ModelLoadError
from workers.loading.file_copy import copy_files, flush_folder
from workers.loading.file_lock import FileLock
from workers.loading.model_files import ModelFiles
from workers.loading.weights import OnProgress

_PARTIAL = ".partial"
_LOCK = ".lock"
_POLL_INTERVAL_S = 0.2
_DISK_IS_FULL = (errno.ENOSPC, errno.EDQUOT)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WeightsLease:
    """Where to read weights from, for as long as the lease is held.

    lock: keeps the copy in folder from being evicted, None where folder is the model's own. A copy
    is never written again, so it may be mapped; what an operator's folder holds may change.
    bytes_awaited: how much was copied before the lease could be had.
    """

    folder: Path
    lock: FileLock | None
    bytes_awaited: int

    @classmethod
    def of_source(cls, folder: Path) -> "WeightsLease":
        """The model's own folder, as it is."""
        return cls(folder, None, 0)

    @property
    def is_copy(self) -> bool:
        return self.lock is not None


class WeightsCache:
    """At most max_bytes of model folders under root, which is made if it is not there.

    Raises ConfigError where root cannot be used.
    """

    def __init__(self, root: Path, max_bytes: int) -> None:
        self._root = root
        self._max_bytes = max_bytes
        try:
            root.mkdir(parents=True, exist_ok=True)
            FileLock(root / f"copy{_LOCK}").close()
        except OSError as error:
            raise ConfigError(f"weights_cache_dir: {error}") from error

    def lease(self, folder: Path, on_progress: OnProgress) -> WeightsLease:
        """The copy of a model folder, made now if no process of this node has made it.

        on_progress(bytes copied, twice the bytes to copy), also while another process copies: the
        second half is the loading that follows. Where there is no room, which a warning says, the
        lease is on the folder itself. Raises ModelLoadError for a folder that cannot be read, and
        ConfigError for one larger than the whole cache.
        """
        files = ModelFiles.of(folder)
        if files.total_bytes > self._max_bytes:
            raise ConfigError(
                f"weights_cache_bytes={self._max_bytes} is less than the {files.total_bytes} "
                f"bytes of {folder}"
            )
        # Held before anybody copies, so that nobody evicts between the copy and its use.
        lock = FileLock(self._root / f"{files.key}{_LOCK}")
        lock.share()
        entry = self._root / files.key
        bytes_awaited = 0
        if not entry.is_dir():
            obstacle = self._await_copy(files, on_progress)
            if obstacle is not None:
                logger.warning("reading %s directly, not through the cache: %s", folder, obstacle)
                lock.close()
                return WeightsLease.of_source(folder)
            bytes_awaited = files.total_bytes
        _check_sizes(entry, files)
        os.utime(lock.path)
        logger.info("weights of %s are read from %s", folder, entry)
        return WeightsLease(entry, lock, bytes_awaited)

    def _await_copy(self, files: ModelFiles, on_progress: OnProgress) -> str | None:
        """Copy, or wait until another process has; returns what stands in the way, or None."""
        entry, partial = self._root / files.key, self._root / f"{files.key}{_PARTIAL}"
        turn = FileLock(self._root / f"copy{_LOCK}")
        try:
            while not entry.is_dir():
                if turn.try_alone():
                    # Another process may have had its turn since the look above.
                    return None if entry.is_dir() else self._copy(files, on_progress)
                num_bytes = _size_of(partial)
                # Counted before the look: what has its own name by now was counted as nothing.
                if not entry.is_dir():
                    on_progress(num_bytes, 2 * files.total_bytes)
                    time.sleep(_POLL_INTERVAL_S)
        finally:
            turn.close()
        return None

    def _copy(self, files: ModelFiles, on_progress: OnProgress) -> str | None:
        """With the turn held: make the copy. Returns what stands in the way, or None."""
        try:
            for left_over in self._root.glob(f"*{_PARTIAL}"):
                shutil.rmtree(left_over)
            obstacle = self._make_room(files.total_bytes)
            if obstacle is None:
                self._fill(self._root / f"{files.key}{_PARTIAL}", files, on_progress)
        except OSError as error:
            if error.errno in _DISK_IS_FULL:
                return f"{self._root} is full"
            raise ModelLoadError(f"copying {files.folder} to {self._root}: {error}") from error
        return obstacle

    def _fill(self, partial: Path, files: ModelFiles, on_progress: OnProgress) -> None:
        """Make the copy under its partial name, then give it its own. Nothing is left otherwise."""

        def on_bytes(num_bytes: int) -> None:
            on_progress(num_bytes, 2 * files.total_bytes)

        logger.info("copying %s (%d bytes) to %s", files.folder, files.total_bytes, self._root)
        partial.mkdir()
        try:
            copy_files(files.folder, partial, [file.name for file in files.files], on_bytes)
            if ModelFiles.of(files.folder) != files:
                raise ModelLoadError(f"{files.folder} was changed while it was copied")
            partial.rename(self._root / files.key)
        except (OSError, ModelLoadError):
            shutil.rmtree(partial, ignore_errors=True)
            raise
        flush_folder(self._root)

    def _make_room(self, num_bytes: int) -> str | None:
        """With the turn held: evict, least recently used first, until num_bytes more fit."""
        entries = [path for path in self._root.iterdir() if _is_entry(path)]
        sizes = {entry: _size_of(entry) for entry in entries}
        for entry in sorted(entries, key=self._last_used_s):
            if self._fits(num_bytes, sum(sizes.values())):
                return None
            if self._evict(entry):
                del sizes[entry]
        if self._fits(num_bytes, sum(sizes.values())):
            return None
        return (
            f"{num_bytes} bytes do not fit beside {sum(sizes.values())} in use into "
            f"weights_cache_bytes={self._max_bytes} and the free space of {self._root}"
        )

    def _fits(self, num_bytes: int, used_bytes: int) -> bool:
        free_bytes = shutil.disk_usage(self._root).free
        return num_bytes <= min(free_bytes, self._max_bytes - used_bytes)

    def _lock_file(self, entry: Path) -> Path:
        return self._root / f"{entry.name}{_LOCK}"

    def _last_used_s(self, entry: Path) -> float:
        lock_file = self._lock_file(entry)
        return lock_file.stat().st_mtime if lock_file.exists() else 0.0

    def _evict(self, entry: Path) -> bool:
        """Remove a copy that nobody uses; whether it was removed."""
        lock = FileLock(self._lock_file(entry))
        try:
            if not lock.try_alone():
                return False
            # By way of a name that nobody takes for complete, should this process die meanwhile.
            doomed = entry.rename(entry.with_name(f"{entry.name}{_PARTIAL}"))
            shutil.rmtree(doomed)
        finally:
            lock.close()
        logger.info("evicted %s", entry)
        return True


def _is_entry(path: Path) -> bool:
    return path.is_dir() and path.suffix != _PARTIAL


def _size_of(folder: Path) -> int:
    """Bytes of the files in a folder; none where it is not there, or no longer."""
    try:
        return sum(path.stat().st_size for path in folder.iterdir())
    except FileNotFoundError:
        return 0


def _check_sizes(entry: Path, files: ModelFiles) -> None:
    for file in files.files:
        path = entry / file.name
        if not path.is_file() or path.stat().st_size != file.num_bytes:
            raise ModelLoadError(
                f"{path} is not what was copied there; remove {entry} and start again"
            )
