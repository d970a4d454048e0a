"""The registry and the choice of a backend, over fake backends so that every rule is reached."""

import logging
from dataclasses import replace

import pytest
import torch

from attention.backends.flash_attention import FlashAttentionBackend
from attention.backends.torch_native import TorchNativeBackend
from attention.backends.triton_paged import TritonBackend
from attention.capability import AttentionBackendError, BackendProbe
from attention.memory.layout import LatentEntry
from attention.preferences import DETERMINISTIC_FORMS, FIRST_IN_SGLANG, PREFERENCES, DeviceFacts
from attention.registration import BackendRegistry
from attention.registry import (
    ATTENTION_BACKENDS,
    create_attention_backend,
    registered_backends,
)
from attention.selection import AttentionNeeds, detect_device, select_attention_backend, why_unfit
from tests.unit.attention.cases import CaseSpec, build_case, rows_of

CPU = DeviceFacts("cpu", "CPU", None)
AMPERE = DeviceFacts("cuda", "A100", (8, 0))
ADA = DeviceFacts("cuda", "L4", (8, 9))
HOPPER = DeviceFacts("cuda", "H200", (9, 0))
BLACKWELL = DeviceFacts("cuda", "B200", (10, 0))
AMD = DeviceFacts("rocm", "AMD Instinct MI300X", None)
CONSUMER_BLACKWELL = DeviceFacts("cuda", "RTX PRO 6000", (12, 0))

FLOAT32 = AttentionNeeds(torch.float32, torch.float32)
BF16 = AttentionNeeds(torch.bfloat16, torch.bfloat16)


def fake_backend(name, missing="", **changes):
    declared = replace(
        TorchNativeBackend.capability,
        **(
            {"name": name, "device_types": ("cuda",), "install_hint": f"pip install {name}"}
            | changes
        ),
    )

    class FakeBackend(TorchNativeBackend):
        capability = declared

        @classmethod
        def probe(cls):
            return BackendProbe(not missing, missing)

    return FakeBackend


def registry_of(*backends):
    registry = BackendRegistry()
    for backend in backends:
        registry.register(backend.capability.name)(backend)
    return registry


NATIVE = {"device_types": ("cuda", "cpu"), "has_mla": True}


def every_backend(*instead):
    """A registry of all preferred names; instead: backends that replace those of their names."""
    fakes = [
        fake_backend("fa3_triton", has_unequal_head_dims=False),
        fake_backend("fa3", has_mla=True),
        fake_backend("fa3_deterministic"),
        fake_backend("fa3_chunks"),
        fake_backend("fa3_fp8"),
        fake_backend("triton", has_mla=True),
        fake_backend("triton_deterministic"),
        fake_backend("triton_fp8"),
        fake_backend("flashinfer", has_mla=True),
        fake_backend("flashinfer_fp8"),
        fake_backend("fa4"),
        fake_backend("flex"),
        fake_backend("torch_native", **NATIVE),
        fake_backend("torch_native_fp8", **NATIVE),
    ]
    replaced = {backend.capability.name: backend for backend in instead}
    return registry_of(*(replaced.get(fake.capability.name, fake) for fake in fakes))


EVERYTHING = every_backend()


@pytest.mark.parametrize(
    ("latent", "obstacle"),
    [
        (None, None),
        (LatentEntry(512, 64), None),
        (LatentEntry(40, 64), "latents of 256 to 512 elements in steps of 8, this model has 40"),
        (LatentEntry(512, 72), "rotated key parts of 8 to 64 elements in steps of 8"),
    ],
)
def test_kernels_for_latents_are_built_for_some_sizes(latent, obstacle):
    sizes = {"latent_dims": range(256, 513, 8), "latent_rope_dims": range(8, 65, 8)}
    capability = fake_backend("fa3", has_mla=True, **sizes).capability
    told = why_unfit(capability, HOPPER, replace(BF16, needs_mla=True, latent=latent))
    assert told is None if obstacle is None else obstacle in told


@pytest.mark.parametrize(
    ("device", "needs_mla", "expected"),
    [
        (CPU, False, "torch_native"),
        (AMPERE, False, "triton"),
        (AMPERE, True, "triton"),
        (ADA, False, "triton"),
        (HOPPER, False, "fa3_triton"),
        (HOPPER, True, "fa3"),
        (BLACKWELL, False, "triton"),
        (BLACKWELL, True, "triton"),
        (CONSUMER_BLACKWELL, False, "triton"),
        (CONSUMER_BLACKWELL, True, "triton"),
    ],
)
def test_automatic_choice_follows_generation_and_attention_kind(device, needs_mla, expected):
    needs = replace(BF16, needs_mla=needs_mla)
    assert select_attention_backend(None, device, needs, EVERYTHING).name == expected


def test_hopper_falls_back_to_fa3_for_models_whose_k_and_v_heads_differ():
    needs = replace(BF16, needs_unequal_head_dims=True)
    choice = select_attention_backend(None, HOPPER, needs, EVERYTHING)
    assert choice.name == "fa3"
    assert [name for name, _ in choice.rejected] == ["fa3_triton"]
    assert "V heads of another size" in choice.rejected[0][1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("is_unequal", "expected"), [(False, "fa3_triton"), (True, "fa3")])
def test_hoppers_own_backends_are_chosen_by_the_models_heads(
    monkeypatch, dtype, is_unequal, expected
):
    monkeypatch.setattr(FlashAttentionBackend, "probe", classmethod(lambda cls: BackendProbe(True)))
    needs = AttentionNeeds(dtype, dtype, needs_unequal_head_dims=is_unequal)
    choice = select_attention_backend(None, HOPPER, needs)
    assert choice.name == expected
    assert choice.page_size == 128


@pytest.mark.parametrize(
    ("device", "kv_dtype", "needs_mla", "expected"),
    [
        (DeviceFacts("cuda", "T4", (7, 5)), torch.bfloat16, False, "torch_native"),
        (AMPERE, torch.bfloat16, False, "triton"),
        (AMPERE, torch.bfloat16, True, "triton"),
        (DeviceFacts("cuda", "A10", (8, 6)), torch.float8_e4m3fn, False, "triton_fp8"),
        (HOPPER, torch.bfloat16, False, "triton"),
        (BLACKWELL, torch.bfloat16, True, "triton"),
        (CONSUMER_BLACKWELL, torch.float8_e4m3fn, False, "triton_fp8"),
    ],
)
def test_where_fa3_does_not_run_our_own_kernels_do(
    monkeypatch, device, kv_dtype, needs_mla, expected
):
    missing = BackendProbe(False, "sgl_kernel")
    monkeypatch.setattr(FlashAttentionBackend, "probe", classmethod(lambda cls: missing))
    monkeypatch.setattr(TritonBackend, "probe", classmethod(lambda cls: BackendProbe(True)))
    needs = AttentionNeeds(torch.bfloat16, kv_dtype, needs_mla=needs_mla)
    assert select_attention_backend(None, device, needs).name == expected


def test_a_backend_that_does_not_load_is_passed_over_and_the_choice_says_so(caplog):
    missing = "package sgl_kernel is not installed"
    registry = every_backend(
        fake_backend("fa3_triton", missing=missing),
        fake_backend("fa3", missing=missing),
        fake_backend("fa3_deterministic", missing=missing),
        fake_backend("fa3_chunks", missing=missing),
        fake_backend("fa3_fp8", page_sizes=(1, 16), default_page_size=1),
    )
    with caplog.at_level(logging.INFO, logger="attention.selection"):
        choice = select_attention_backend(None, HOPPER, BF16, registry)
    assert choice.name == "fa3_fp8"
    assert choice.page_size == 1
    passed_over = ["fa3_triton", "fa3", "fa3_chunks"]
    assert [name for name, _ in choice.rejected] == passed_over
    assert "sgl_kernel" in choice.rejected[0][1]
    assert "pip install fa3" in str(choice)
    assert "fa3_fp8" in caplog.text
    assert "sgl_kernel" in caplog.text


def test_the_order_of_preference_names_every_backend_that_there_is():
    registered = {backend.capability.name for backend in registered_backends()}
    named = {
        name for preference in PREFERENCES.values() for name in preference.mha + preference.mla
    }
    assert named | set(DETERMINISTIC_FORMS.values()) == registered
    assert not named & set(DETERMINISTIC_FORMS.values())
    assert PREFERENCES.keys() == FIRST_IN_SGLANG.keys()


def first_of(device, needs_mla):
    preference = PREFERENCES[device.generation]
    return (preference.mla if needs_mla else preference.mha)[0]


@pytest.mark.parametrize("needs_mla", [False, True], ids=["heads", "latents"])
@pytest.mark.parametrize("device", [CPU, AMPERE, HOPPER, BLACKWELL, AMD], ids=str)
def test_an_order_that_begins_unlike_the_published_one_says_why(device, needs_mla):
    preference = PREFERENCES[device.generation]
    why = preference.why_mla if needs_mla else preference.why_mha
    is_as_published = first_of(device, needs_mla) == FIRST_IN_SGLANG[device.generation][needs_mla]
    assert bool(why) != is_as_published


def test_no_backend_is_chosen_on_an_amd_gpu_and_the_error_says_what_it_would_take():
    with pytest.raises(AttentionBackendError, match="MI300.*aiter: is a name only.*ROCm"):
        select_attention_backend(None, AMD, BF16)


@pytest.mark.parametrize(
    ("changes", "device", "needs", "why"),
    [
        ({"device_types": ("cuda",)}, CPU, FLOAT32, "not on CPU"),
        ({"min_compute_capability": (9, 0)}, AMPERE, BF16, "needs sm90 or newer"),
        ({"max_compute_capability": (9, 0)}, BLACKWELL, BF16, "beyond sm90"),
        ({"dtypes": (torch.bfloat16,)}, HOPPER, FLOAT32, "does not compute in torch.float32"),
        ({"kv_dtypes": (torch.bfloat16,)}, HOPPER, FLOAT32, "KV cache in torch.float32"),
        (
            {"page_sizes": (64,), "default_page_size": 64},
            HOPPER,
            replace(BF16, page_size=16),
            "page size 16",
        ),
        (
            {"has_sliding_window": False},
            HOPPER,
            replace(BF16, needs_sliding_window=True),
            "sliding windows",
        ),
        ({"has_logit_cap": False}, HOPPER, replace(BF16, needs_logit_cap=True), "logit caps"),
        ({"has_sinks": False}, HOPPER, replace(BF16, needs_sinks=True), "sinks"),
        ({"has_mla": False}, HOPPER, replace(BF16, needs_mla=True), "latent"),
        (
            {"is_deterministic": False},
            HOPPER,
            replace(BF16, needs_deterministic=True),
            "deterministic mode",
        ),
        (
            {"has_unequal_head_dims": False},
            HOPPER,
            replace(BF16, needs_unequal_head_dims=True),
            "V heads of another size than K heads",
        ),
    ],
)
def test_an_asked_for_backend_that_is_unfit_is_an_error_that_says_why(changes, device, needs, why):
    registry = registry_of(fake_backend("special", **changes), TorchNativeBackend)
    with pytest.raises(AttentionBackendError, match="'special' was asked for") as failure:
        select_attention_backend("special", device, needs, registry)
    assert why in str(failure.value)


def test_an_asked_for_backend_that_cannot_load_says_what_to_install():
    registry = registry_of(fake_backend("fa3", missing="package sgl_kernel is not installed"))
    with pytest.raises(AttentionBackendError, match="sgl_kernel.*pip install fa3"):
        select_attention_backend("fa3", HOPPER, BF16, registry)


def test_an_unknown_name_is_an_error_that_lists_the_known_ones():
    with pytest.raises(AttentionBackendError, match="no attention backend named 'fa9'.*torch_nat"):
        select_attention_backend("fa9", CPU, FLOAT32)


def test_no_fitting_backend_at_all_is_an_error_with_every_reason():
    needs = AttentionNeeds(torch.float64, torch.float64)
    with pytest.raises(AttentionBackendError, match="fa3_triton: .*fa3: .*torch_native: "):
        select_attention_backend(None, HOPPER, needs, EVERYTHING)


def test_asked_for_page_size_wins_over_the_backends_own():
    assert select_attention_backend(None, CPU, FLOAT32).page_size == 16
    asked = replace(FLOAT32, page_size=7)
    assert select_attention_backend("torch_native", CPU, asked).page_size == 7


def test_cpu_facts_are_detected():
    assert detect_device(torch.device("cpu")) == CPU


def test_registered_names_match_their_capabilities():
    names = [backend.capability.name for backend in registered_backends()]
    assert "torch_native" in names
    assert all(ATTENTION_BACKENDS.get(name).capability.name == name for name in names)


def test_a_name_is_registered_once_and_under_its_own_name():
    registry = registry_of(TorchNativeBackend)
    with pytest.raises(ValueError, match="twice"):
        registry.register("torch_native")(TorchNativeBackend)
    with pytest.raises(ValueError, match="capability says"):
        registry.register("other")(TorchNativeBackend)


def test_a_default_page_size_outside_the_supported_ones_is_refused():
    with pytest.raises(ValueError, match="default_page_size"):
        replace(TorchNativeBackend.capability, default_page_size=512)


def test_created_backend_is_the_registered_class_over_the_given_pools():
    case = build_case(CaseSpec(rows_of((3, 1))))
    backend = create_attention_backend(
        "torch_native", case.config, case.req_to_token_pool, case.token_to_kv_pool
    )
    assert type(backend) is TorchNativeBackend
    assert backend.token_to_kv_pool is case.token_to_kv_pool


def test_creating_a_backend_that_cannot_load_is_an_error(monkeypatch):
    monkeypatch.setattr(
        TorchNativeBackend, "probe", classmethod(lambda cls: BackendProbe(False, "no torch"))
    )
    case = build_case(CaseSpec(rows_of((3, 1))))
    with pytest.raises(AttentionBackendError, match="no torch"):
        create_attention_backend(
            "torch_native", case.config, case.req_to_token_pool, case.token_to_kv_pool
        )


@pytest.mark.parametrize(
    ("asked", "device", "chosen"),
    [
        (None, HOPPER, "fa3_deterministic"),
        ("fa3", HOPPER, "fa3_deterministic"),
        ("triton", HOPPER, "triton_deterministic"),
        (None, AMPERE, "triton_deterministic"),
        (None, CPU, "torch_native"),
    ],
)
def test_where_results_may_depend_on_no_batch_the_form_that_does_not_is_taken(
    asked, device, chosen
):
    """Of what backends declare, all of them loaded."""
    probe = classmethod(lambda cls: BackendProbe(True))
    loaded = [type(b.__name__, (b,), {"probe": probe}) for b in registered_backends()]
    needs = replace(BF16, needs_deterministic=True)
    assert select_attention_backend(asked, device, needs, registry_of(*loaded)).name == chosen


def test_a_backend_whose_results_depend_on_the_batch_is_refused_in_deterministic_mode():
    needs = replace(BF16, needs_deterministic=True)
    with pytest.raises(AttentionBackendError, match="'fa3_triton' was asked for but .*shares"):
        select_attention_backend("fa3_triton", HOPPER, needs)
