"""Copies files to a local disk, several at a time, so that they are wholly there when it returns.

Knows no cache and no model.
"""

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

_MAX_FILES_AT_ONCE = 4
_CHUNK_BYTES = 8 << 20
_REPORT_INTERVAL_S = 0.2


def copy_files(
    source: Path, target: Path, names: Sequence[str], on_bytes: Callable[[int], None]
) -> None:
    """Copy the named files from folder to folder and flush them to disk.

    on_bytes(bytes so far) is called by the calling thread alone. What was read of the source leaves
    the page cache; what was written stays in it. Raises the first OSError; files are then partly
    written.
    """
    has_failed = threading.Event()
    copies = [_Copy(source / name, target / name, has_failed) for name in names]
    with ThreadPoolExecutor(_MAX_FILES_AT_ONCE, thread_name_prefix="tessera-copy") as pool:
        pending = futures = {pool.submit(copy.run) for copy in copies}
        while pending:
            _, pending = wait(pending, timeout=_REPORT_INTERVAL_S)
            on_bytes(sum(copy.num_bytes for copy in copies))
    for future in futures:
        future.result()
    flush_folder(target)


class _Copy:
    """One file. num_bytes: how much of it is written."""

    def __init__(self, source: Path, target: Path, has_failed: threading.Event) -> None:
        self._source = source
        self._target = target
        self._has_failed = has_failed
        self.num_bytes = 0

    def run(self) -> None:
        """Ends early, with the file incomplete, where another copy has failed."""
        try:
            self._run()
        except OSError:
            self._has_failed.set()
            raise

    def _run(self) -> None:
        buffer = memoryview(bytearray(_CHUNK_BYTES))
        with (
            self._source.open("rb", buffering=0) as reader,
            self._target.open("xb", buffering=0) as writer,
        ):
            while not self._has_failed.is_set() and (size := reader.readinto(buffer)):
                _write_all(writer.fileno(), buffer[:size])
                self.num_bytes += size
            os.fsync(writer.fileno())
            os.posix_fadvise(reader.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def flush_folder(folder: Path) -> None:
    """Make the names in a folder outlive a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
