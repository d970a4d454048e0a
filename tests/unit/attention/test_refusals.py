"""Every registered name, asked for where it cannot run: one line with the reason and the remedy."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from attention.capability import AttentionBackendError, BackendCapability, BackendProbe
from attention.config import LayerAttentionConfig
from attention.features import Feature
from attention.memory.layout import LatentEntry
from attention.preferences import DETERMINISTIC_FORMS, DeviceFacts
from attention.registry import registered_backends
from attention.routes import AskedBackends, choose_routes
from attention.selection import AttentionNeeds, select_attention_backend
from attention.visibility import VisibilityKind

CPU = DeviceFacts("cpu", "CPU", None)
GAUDI = DeviceFacts("hpu", "Gaudi 3", None)
NOWHERE_KNOWN = (512 + 8, 512 + 8)


@dataclass(frozen=True)
class Refusal:
    """A device and needs of which the first refused thing is one, and a part of the reason."""

    device: DeviceFacts
    needs: AttentionNeeds
    reason: str


def home(capability: BackendCapability) -> DeviceFacts:
    if "cpu" in capability.device_types:
        return CPU
    return DeviceFacts("cuda", "its own GPU", capability.min_compute_capability)


def needs_of(capability: BackendCapability) -> AttentionNeeds:
    """What it can do."""
    dtype = capability.dtypes[0]
    kv_dtype = dtype if dtype in capability.kv_dtypes else capability.kv_dtypes[0]
    if capability.has_heads:
        return AttentionNeeds(dtype, kv_dtype)
    return AttentionNeeds(dtype, kv_dtype, needs_mla=True, latent=LatentEntry(512, 64))


NEED_OF_FEATURE = {
    Feature.WINDOW: {"needs_sliding_window": True},
    Feature.CAP: {"needs_logit_cap": True},
    Feature.SINKS: {"needs_sinks": True},
    Feature.UNEQUAL_HEAD_DIMS: {"needs_unequal_head_dims": True},
    Feature.MLA: {"needs_mla": True},
    Feature.HEADS: {"needs_mla": False, "latent": None},
    Feature.CHUNKS: {"needs_chunked_attention": True, "chunk_size": 256},
    Feature.UNLIKE_LAYERS: {"needs_unlike_layers": True},
    Feature.SHARED_KV: {"needs_shared_kv": True},
    Feature.CROSS: {"needs_cross_attention": True},
    Feature.MIXED: {"needs_mixed_batches": True},
    Feature.DETERMINISTIC: {"needs_deterministic": True},
    **{
        Feature(kind.value): {"visibilities": frozenset({VisibilityKind.CAUSAL, kind})}
        for kind in VisibilityKind
    },
}


def refusals_of(capability: BackendCapability) -> dict[str, Refusal]:
    device, needs = home(capability), needs_of(capability)
    found = {
        "device": Refusal(GAUDI, needs, "not on Gaudi 3"),
        "dtype": Refusal(device, replace(needs, dtype=torch.float64), "does not compute in"),
        "kv_dtype": Refusal(device, replace(needs, kv_dtype=torch.int8), "KV cache in torch.int8"),
        "page_size": Refusal(device, replace(needs, page_size=257), "page size 257, only with"),
        **of_gpus(capability, needs),
        **of_sizes(capability, device, needs),
    }
    missing = set(Feature) - capability.features
    if capability.name in DETERMINISTIC_FORMS:
        missing = missing - {Feature.DETERMINISTIC}  # its form is taken in its place
    for feature, need in NEED_OF_FEATURE.items():
        if feature in missing:
            why = f"has no {feature}, which this model needs: {capability.why_not[feature]}"
            found[feature.name] = Refusal(device, replace(needs, **need), why)
    return found


def of_gpus(capability: BackendCapability, needs: AttentionNeeds) -> dict[str, Refusal]:
    found = {}
    if "cpu" not in capability.device_types:
        found["no GPU"] = Refusal(CPU, needs, "not on CPU")
    lowest, highest = capability.min_compute_capability, capability.max_compute_capability
    if lowest is not None:
        older = DeviceFacts("cuda", "older", (lowest[0] - 1, 0))
        found["older GPU"] = Refusal(older, needs, f"needs sm{lowest[0]}{lowest[1]} or newer")
    if highest is not None:
        newer = DeviceFacts("cuda", "newer", (highest[0] + 2, 0))
        found["newer GPU"] = Refusal(newer, needs, f"beyond sm{highest[0]}{highest[1]}")
    return found


def of_sizes(
    capability: BackendCapability, device: DeviceFacts, needs: AttentionNeeds
) -> dict[str, Refusal]:
    """Of heads and of latents."""
    found = {}
    if capability.head_dims is not None and capability.has_heads:
        dims = replace(needs, head_dims=NOWHERE_KNOWN)
        found["head_dims"] = Refusal(device, dims, "this model's have 520 and 520")
    has_pairs = capability.has_heads and capability.has_unequal_head_dims
    if capability.unequal_head_dims and has_pairs:
        unlike = replace(needs, needs_unequal_head_dims=True, head_dims=(128, 64))
        found["unlike_head_dims"] = Refusal(device, unlike, "this model's have 128 and 64")
    if capability.latent_dims is not None and capability.has_mla:
        small = replace(needs, needs_mla=True, latent=LatentEntry(4, 64))
        found["latent"] = Refusal(device, small, "this model has 4")
    return found


BUILT = [backend for backend in registered_backends() if backend.capability.is_built]
CASES = [
    pytest.param(backend, refusal, id=f"{backend.capability.name}-{kind}")
    for backend in BUILT
    for kind, refusal in refusals_of(backend.capability).items()
]
REMEDIES = ("what fits this model on", "no other backend fits this model on this device either")


@pytest.fixture
def loads(monkeypatch):
    """Every package is there: a reason is never that one is not."""
    for backend in registered_backends():
        monkeypatch.setattr(backend, "probe", classmethod(lambda cls: BackendProbe(True)))


def message_of(name: str, refusal: Refusal) -> str:
    with pytest.raises(AttentionBackendError) as failure:
        select_attention_backend(name, refusal.device, refusal.needs)
    return str(failure.value)


@pytest.mark.usefixtures("loads")
@pytest.mark.parametrize("backend", BUILT, ids=lambda backend: backend.capability.name)
def test_where_it_can_run_it_is_what_was_asked_for(backend):
    """So that a refusal below is for the reason that it names."""
    capability = backend.capability
    choice = select_attention_backend(capability.name, home(capability), needs_of(capability))
    assert (choice.name, choice.page_size) == (capability.name, capability.default_page_size)


@pytest.mark.usefixtures("loads")
@pytest.mark.parametrize(("backend", "refusal"), CASES)
def test_a_backend_that_cannot_run_says_why_and_what_can(backend, refusal):
    name = backend.capability.name
    message = message_of(name, refusal)
    assert message.startswith(f"attention backend {name!r} was asked for but ")
    assert refusal.reason in message
    assert any(remedy in message for remedy in REMEDIES)
    assert "\n" not in message


@pytest.mark.usefixtures("loads")
@pytest.mark.parametrize(("backend", "refusal"), CASES)
def test_what_is_named_as_the_remedy_works(backend, refusal):
    message = message_of(backend.capability.name, refusal)
    _, separator, rest = message.partition("what fits this model on ")
    names = rest.partition(": ")[2].partition(" (")[0].split(", ") if separator else []
    assert backend.capability.name not in names
    for name in names:
        assert select_attention_backend(name, refusal.device, refusal.needs).name == name


@pytest.mark.parametrize("phase", ["extend", "decode"])
@pytest.mark.parametrize("backend", BUILT, ids=lambda backend: backend.capability.name)
def test_either_phase_of_a_hybrid_is_refused_as_both_are(backend, phase, monkeypatch):
    """As --prefill-attention-backend and --decode-attention-backend ask for it."""
    capability = backend.capability
    monkeypatch.setattr(backend, "probe", classmethod(lambda cls: BackendProbe(False, "no wheel")))
    needs = needs_of(capability)
    other = "torch_native_fp8" if needs.kv_dtype == torch.float8_e4m3fn else "torch_native"
    asked = replace(AskedBackends(other, other), **{phase: capability.name})
    with pytest.raises(AttentionBackendError) as failure:
        choose_routes(asked, home(capability), needs, (LayerAttentionConfig(),))
    told = f"attention backend {capability.name!r} was asked for but cannot load: no wheel"
    assert str(failure.value).startswith(told)


@pytest.mark.parametrize("backend", BUILT, ids=lambda backend: backend.capability.name)
def test_a_package_that_is_missing_is_named_with_its_install(backend, monkeypatch):
    capability = backend.capability
    missing = BackendProbe(False, "its package does not load here")
    monkeypatch.setattr(backend, "probe", classmethod(lambda cls: missing))
    message = message_of(
        capability.name, Refusal(home(capability), needs_of(capability), "does not load")
    )
    assert "cannot load: its package does not load here; to install: " in message
    assert capability.install_hint in message


def test_a_name_that_is_not_built_says_what_it_would_take():
    message = message_of("aiter", Refusal(CPU, AttentionNeeds(torch.float32, torch.float32), ""))
    assert "'aiter' was asked for but is a name only: nothing of it is built here" in message
    assert "AMD's package aiter" in message
    assert "what fits this model on CPU: torch_native" in message
