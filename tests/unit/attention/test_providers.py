"""Kernel packages: the first installed one is taken, and a missing or broken one is said aloud."""

import sys
from types import ModuleType

import pytest

from attention.capability import AttentionBackendError
from attention.kernels import providers
from attention.kernels.providers import FlashAttention3Package, load_flash_attention_3

ABSENT = FlashAttention3Package("absent-dist", "no_such_package", "no_such_package.kernels")


def write_package(folder, name: str, source: str) -> FlashAttention3Package:
    (folder / f"{name}.py").write_text(source)
    return FlashAttention3Package(f"{name}-dist", name, name)


WITH_SINKS = """
def flash_attn_with_kvcache(q, sinks=None): return q
def flash_attn_varlen_func(q): return q
def get_scheduler_metadata(batch_size): return batch_size
"""
WITHOUT_SINKS = WITH_SINKS.replace(", sinks=None", "")
BROKEN = "raise ImportError('undefined symbol: aten')"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_first_installed_package_is_taken(folder):
    first = write_package(folder, "fa3_first", WITH_SINKS)
    second = write_package(folder, "fa3_second", WITHOUT_SINKS)
    assert load_flash_attention_3((ABSENT, first, second)).package == "fa3_first-dist"


@pytest.mark.parametrize(("source", "has_sinks"), [(WITH_SINKS, True), (WITHOUT_SINKS, False)])
def test_sinks_are_read_off_the_package(folder, source, has_sinks):
    package = write_package(folder, "fa3_only", source)
    assert load_flash_attention_3((package,)).has_sinks is has_sinks


def test_no_package_names_all_and_the_install():
    with pytest.raises(AttentionBackendError, match="absent-dist.*pip install"):
        load_flash_attention_3((ABSENT,))


def test_broken_package_is_an_error_not_a_reason_to_take_the_next(folder):
    broken = write_package(folder, "fa3_broken", BROKEN)
    good = write_package(folder, "fa3_good", WITH_SINKS)
    with pytest.raises(AttentionBackendError, match="undefined symbol"):
        load_flash_attention_3((broken, good))


def test_probe_reports_what_does_not_load(monkeypatch):
    def refuse() -> ModuleType:
        raise AttentionBackendError("kernels are not here")

    monkeypatch.setattr(providers, "load_flash_attention_3", refuse)
    probe = providers.probe_flash_attention_3()
    assert not probe.is_available
    assert probe.missing == "kernels are not here"


def test_triton_is_required_by_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(AttentionBackendError, match="triton does not load.*pip install triton"):
        providers.load_triton_kernels()
