"""Processes that share a weights cache, with copying slow enough to meet in the middle of it."""

import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch

from workers.loading import file_copy, weights_cache
from workers.loading.weights_cache import WeightsCache

FORK = multiprocessing.get_context("fork")
ROOMY = 1 << 30


def write_model(folder: Path, num_bytes: int = 4096, content: bytes = b"w") -> Path:
    """Something with a model folder's files; nobody here looks into them."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(content * num_bytes)
    return folder


def slow_down(monkeypatch: pytest.MonkeyPatch, byte_s: float) -> None:
    """Copy byte by byte, with a pause before each; forked processes inherit it."""
    write = file_copy._write_all

    def write_slowly(descriptor: int, data: memoryview) -> None:
        time.sleep(byte_s)
        write(descriptor, data)

    monkeypatch.setattr(file_copy, "_CHUNK_BYTES", 1)
    monkeypatch.setattr(file_copy, "_write_all", write_slowly)


def start_process(work: Callable[[Connection], None]) -> tuple[BaseProcess, Connection]:
    """A fork of this process that does the work, and the end of its pipe."""
    here, there = FORK.Pipe()

    def run() -> None:
        # A fork makes torch's threads anew; threads of its own that came to do so at once would
        # find none.
        torch.set_num_threads(1)
        work(there)

    process = FORK.Process(target=run, daemon=True)
    process.start()
    return process, here


def lease_and_tell(
    root: Path, folder: Path, num_processes: int = 1
) -> Callable[[Connection], None]:
    """Work that leases once num_processes do, sends (bytes awaited, weights, copies it made) and
    ends.
    """
    start = FORK.Barrier(num_processes)

    def work(pipe: Connection) -> None:
        start.wait(20.0)
        num_copies = 0
        copy_files = file_copy.copy_files

        def counted(*arguments: Any) -> None:
            nonlocal num_copies
            num_copies += 1
            copy_files(*arguments)

        # This process does nothing else afterwards.
        weights_cache.copy_files = counted
        lease = WeightsCache(root, ROOMY).lease(folder, lambda done, total: None)
        weights = (lease.folder / "model.safetensors").read_bytes()
        pipe.send((lease.bytes_awaited, weights, num_copies))

    return work


def wait_for(condition: Callable[[], Any], timeout_s: float = 60.0) -> None:
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, "it never came"
        time.sleep(0.005)
