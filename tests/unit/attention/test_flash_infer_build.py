"""FlashInfer's kernels are compiled when a backend is built, with progress and clear errors."""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from attention.backends.flash_infer import FlashInferBackend
from attention.capability import AttentionBackendError, BackendProbe
from attention.kernels import flash_infer, providers
from attention.kernels.flash_infer import (
    compile_modules,
    load_flash_infer,
    missing_compiler,
    probe_flash_infer,
    share_workspace,
)
from tests.fakes.flash_infer import FakePackage


@dataclass
class Module:
    name: str
    build_dir: Path = Path("/nowhere")
    sources: tuple[str, ...] = ("one.cu", "two.cu")
    is_compiled: bool = False
    run: Callable[[Path], None] | None = None

    def build(self, verbose):
        assert not verbose
        self.run(self.build_dir)


@pytest.fixture
def compiler(monkeypatch):
    monkeypatch.setattr(flash_infer, "missing_compiler", lambda: None)


@pytest.mark.usefixtures("compiler")
def test_what_is_missing_is_compiled_and_progress_is_logged(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    told = threading.Event()

    class Watch(logging.Handler):
        def emit(self, record):
            if "1 of 2 files" in record.getMessage():
                told.set()

    def run(folder):
        (folder / "one.cuda.o").touch()
        assert told.wait(60)
        (folder / "two.cuda.o").touch()

    modules = [Module("done", is_compiled=True), Module("missing", tmp_path, run=run)]
    logger, watch = logging.getLogger("attention.kernels.flash_infer"), Watch()
    logger.addHandler(watch)
    try:
        compile_modules(lambda: modules, interval_s=0.01)
    finally:
        logger.removeHandler(watch)
    messages = [record.getMessage() for record in caplog.records]
    assert messages[0].endswith("takes minutes: missing")
    assert messages[-1] == "FlashInfer has compiled 2 of 2 files"


def test_nothing_is_asked_of_a_machine_that_has_all_compiled():
    compile_modules(lambda: [Module("done", is_compiled=True)])


def test_a_folder_that_cannot_be_written_to_is_told_with_the_setting():
    def read_only():
        raise PermissionError("[Errno 13] Permission denied: '/.cache'")

    with pytest.raises(AttentionBackendError, match=r"denied: '/.cache'. FLASHINFER_WORKSPACE_"):
        compile_modules(read_only)


@pytest.mark.usefixtures("compiler")
def test_a_failed_compilation_tells_its_last_lines():
    def run(folder):
        raise RuntimeError("Ninja build failed. " + "x" * 5000 + " ptxas fatal: out of memory")

    modules = [Module("good", run=lambda folder: None), Module("bad", run=run)]
    with pytest.raises(AttentionBackendError, match="did not compile: x.*ptxas fatal: out of mem"):
        compile_modules(lambda: modules)


@pytest.mark.parametrize(("tools", "named"), [((), "nvcc and ninja"), (("ninja",), "no nvcc,")])
def test_without_a_compiler_the_error_says_where_it_was_looked_for(
    monkeypatch, tmp_path, tools, named
):
    for tool in tools:
        (tmp_path / tool).touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    with pytest.raises(AttentionBackendError, match=f"{named}.*PATH and in /nowhere/bin.*install"):
        compile_modules(lambda: [Module("missing")])


def test_nvcc_below_cuda_home_is_enough(monkeypatch, tmp_path):
    (tmp_path / "cuda" / "bin").mkdir(parents=True)
    (tmp_path / "cuda" / "bin" / "nvcc").touch(mode=0o755)
    (tmp_path / "ninja").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    assert missing_compiler() is None


def test_the_probe_names_what_is_missing(monkeypatch):
    def missing():
        raise AttentionBackendError("flashinfer does not load here")

    monkeypatch.setattr(flash_infer, "load_flash_infer", missing)
    assert probe_flash_infer() == BackendProbe(False, "flashinfer does not load here")
    monkeypatch.setattr(flash_infer, "load_flash_infer", FakePackage().kernels)
    monkeypatch.setattr(flash_infer, "missing_compiler", lambda: "nvcc")
    assert probe_flash_infer() == BackendProbe(False, "nvcc")
    monkeypatch.setattr(flash_infer, "has_compiled_package", lambda: True)
    assert probe_flash_infer() == BackendProbe(True)


def test_its_own_kernels_come_first_in_the_backend_s_probe(monkeypatch):
    def missing(name, install):
        raise AttentionBackendError(f"{name} does not load here. To install: {install}")

    monkeypatch.setattr(providers, "_import", missing)
    assert FlashInferBackend.probe().missing.startswith("triton does not load here")


@pytest.mark.skipif(torch.cuda.is_available(), reason="may be installed")
def test_a_package_that_is_not_there_is_named_with_its_install():
    with pytest.raises(AttentionBackendError, match=r"No module named 'flashinfer'.*pip install"):
        load_flash_infer()


def test_another_version_s_wrapper_is_refused():
    with pytest.raises(AttentionBackendError, match="object of this flashinfer keeps no _int_work"):
        share_workspace(object(), torch.zeros(1))
