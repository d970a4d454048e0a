"""Candidates: who can attend in a phase, over one pool, and why the others cannot."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from attention.backends.base import GraphAttentionBackend
from attention.backends.torch_native import TorchNativeBackend
from attention.capability import AttentionBackendError, BackendProbe
from attention.config import LayerAttentionConfig
from attention.preferences import PREFERENCES, DeviceFacts, DeviceGeneration, Preference
from attention.registration import BackendRegistry
from attention.routes import AskedBackends
from attention.selection import AttentionNeeds
from attention.timing import AttentionPhase
from attention.tuning import candidates
from attention.tuning.candidates import AUTO_TUNED, CandidateSearch, CandidateSet, is_tuned
from tests.unit.attention.tuning.doubles import DECODE, EXTEND

CPU = DeviceFacts("cpu", "CPU", None)
NEEDS = AttentionNeeds(torch.float32, torch.float32)
PLAIN, WINDOW = LayerAttentionConfig(), LayerAttentionConfig(sliding_window_size=8)
BOTH = AskedBackends(AUTO_TUNED, AUTO_TUNED)


LOADS = BackendProbe(True)


def backend(name, is_graphable=False, probe=LOADS, **capability):
    facts = {"name": name, "is_fallback": False} | capability
    own = replace(TorchNativeBackend.capability, **facts)
    bases = (TorchNativeBackend, GraphAttentionBackend) if is_graphable else (TorchNativeBackend,)
    members = {"capability": own, "probe": classmethod(lambda cls: probe)}
    return type(name, bases, members)


def search(monkeypatch, *backends, asked=BOTH, layers=(PLAIN,) * 3, needs=NEEDS, **changes):
    registry = BackendRegistry()
    for one in backends:
        registry.register(one.capability.name)(one)
    order = Preference(mha=tuple(one.capability.name for one in backends), mla=())
    monkeypatch.setitem(PREFERENCES, DeviceGeneration.NO_GPU, order)
    facts = {"graphs_decode": False, "registry": registry} | changes
    return CandidateSearch(asked, CPU, needs, layers, **facts).sets()


def test_all_that_load_and_fit_are_candidates_in_the_order_of_preference(monkeypatch):
    absent = backend("absent", probe=BackendProbe(False, "no module named kernels"))
    other = backend("other", dtypes=(torch.bfloat16,))
    (found,) = search(monkeypatch, absent, backend("a"), other, backend("b"))
    assert found.names == {DECODE: ("a", "b"), EXTEND: ("a", "b")}
    assert found.layers[DECODE]["b"] == ("b",) * 3
    reasons = {(one.phase, one.name): one.reason for one in found.left_out}
    assert "no module named kernels" in reasons[DECODE, "absent"]
    assert "does not compute in torch.float32" in reasons[EXTEND, "other"]


def test_a_layer_that_a_candidate_cannot_do_takes_the_automatic_choice(monkeypatch):
    plain_only = backend("plain_only", has_sliding_window=False)
    (found,) = search(monkeypatch, backend("a"), plain_only, layers=(PLAIN, WINDOW, PLAIN))
    assert found.layers[EXTEND] == {
        "a": ("a", "a", "a"),
        "plain_only+a": ("plain_only", "a", "plain_only"),
    }


def test_a_phase_with_a_backend_of_its_own_is_not_tuned(monkeypatch):
    asked = AskedBackends("b", AUTO_TUNED)
    (found,) = search(monkeypatch, backend("a"), backend("b"), asked=asked)
    assert found.names == {DECODE: ("a", "b"), EXTEND: ("b",)}
    assert is_tuned(asked)
    assert not is_tuned(AskedBackends("a", None))


def test_drafts_are_a_phase_of_their_own_where_there_are_any(monkeypatch):
    (found,) = search(monkeypatch, backend("a"), backend("b"), has_verify=True)
    assert found.names[AttentionPhase.VERIFY] == ("a", "b")


def test_decode_candidates_can_be_captured_where_steps_are(monkeypatch):
    captured = backend("captured", is_graphable=True)
    (found,) = search(monkeypatch, captured, backend("eager"), graphs_decode=True)
    assert found.names == {DECODE: ("captured",), EXTEND: ("captured", "eager")}
    assert [one.reason for one in found.left_out] == ["eager cannot be captured in CUDA graphs"]
    (found,) = search(monkeypatch, backend("eager"), captured, graphs_decode=True)
    assert found.names[DECODE] == ("eager", "captured"), "nothing would be captured without it"


def test_candidates_keep_windows_tokens_alike(monkeypatch):
    accounts = backend("accounts", has_bounded_accounts=True)
    whole = backend("whole", has_bounded_accounts=False)
    (found,) = search(monkeypatch, accounts, whole, layers=(PLAIN, WINDOW))
    assert found.names[EXTEND] == ("accounts",)
    assert "whole keeps every token of layers with windows" in found.left_out[0].reason
    (found,) = search(monkeypatch, accounts, whole)
    assert found.names[EXTEND] == ("accounts", "whole")
    assert found.has_bounded_accounts


def test_who_needs_other_pages_makes_a_set_with_all_that_work_with_them(monkeypatch):
    any_size = backend("any_size", default_page_size=16)
    only_64 = backend("only_64", page_sizes=(64,), default_page_size=64)
    only_16 = backend("only_16", page_sizes=(16,), default_page_size=16)
    first, second = search(monkeypatch, any_size, only_64, only_16)
    assert (first.page_size, first.names[DECODE]) == (16, ("any_size", "only_16"))
    assert (second.page_size, second.names[DECODE]) == (64, ("any_size", "only_64"))
    assert ("only_64", "does not work with pages of 16 tokens") in [
        (one.name, one.reason) for one in first.left_out
    ]


def test_a_page_size_that_was_asked_for_is_the_only_one(monkeypatch):
    only_64 = backend("only_64", page_sizes=(64,), default_page_size=64)
    needs = replace(NEEDS, page_size=16)
    (found,) = search(monkeypatch, backend("a"), only_64, needs=needs)
    assert (found.page_size, found.names[DECODE]) == (16, ("a",))


def test_deterministic_mode_is_refused_with_its_reason(monkeypatch):
    with pytest.raises(AttentionBackendError, match="deterministic mode needs a backend by name"):
        search(monkeypatch, backend("a"), needs=replace(NEEDS, needs_deterministic=True))


def test_where_nothing_works_the_error_is_that_of_the_automatic_choice(monkeypatch):
    absent = backend("absent", probe=BackendProbe(False, "no module named kernels"))
    with pytest.raises(AttentionBackendError, match="no attention backend works on CPU"):
        search(monkeypatch, absent)


def test_who_compiles_for_minutes_waits_for_a_start_of_its_own(monkeypatch):
    slow = backend("slow")
    slow.compiles_first = classmethod(lambda cls, config: "three kernels")
    (found,) = search(monkeypatch, slow, backend("a"))
    register(monkeypatch, slow, backend("a"))
    ready = found.worth_measuring(HEADS)
    assert ready.names == {DECODE: ("a",), EXTEND: ("a",)}
    assert ready.left_out[0].reason == (
        "takes minutes to build on this machine (three kernels): one start with "
        "attention_backend=slow does that"
    )
    (alone,) = search(monkeypatch, slow)
    assert alone.worth_measuring(HEADS).names == {DECODE: ("slow",), EXTEND: ("slow",)}


HEADS = SimpleNamespace(latent=None)


def register(monkeypatch, *backends):
    registry = BackendRegistry()
    for one in backends:
        registry.register(one.capability.name)(one)
    monkeypatch.setattr(candidates, "ATTENTION_BACKENDS", registry)


def test_fallbacks_are_measured_where_a_phase_has_nobody_else(monkeypatch):
    """They are many times slower, and what measures them has less time for the others."""
    plain, masks = (backend(name, is_fallback=True) for name in ("plain", "masks"))
    register(monkeypatch, backend("a"), plain, masks)
    (found,) = search(monkeypatch, backend("a"), plain, masks)
    taken = found.worth_measuring(HEADS)
    assert taken.names == {DECODE: ("a",), EXTEND: ("a",)}
    assert {(one.phase, one.name) for one in taken.left_out} == {
        (phase, name) for phase in (DECODE, EXTEND) for name in ("plain", "masks")
    }
    assert "to be fast" in taken.left_out[0].reason
    (alone,) = search(monkeypatch, plain, masks)
    assert alone.worth_measuring(HEADS).names[DECODE] == ("plain", "masks")


def test_who_needs_a_fallback_in_some_layers_is_measured(monkeypatch):
    register(monkeypatch, backend("a"), backend("plain", is_fallback=True))
    layers = {DECODE: {"a+plain": ("a", "plain"), "plain": ("plain", "plain")}}
    found = CandidateSet(16, False, layers)
    assert found.worth_measuring(HEADS).names == {DECODE: ("a+plain",)}
