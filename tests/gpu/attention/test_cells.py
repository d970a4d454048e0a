"""What backends declare is what they can do on the device: a grid made from their capabilities.

One step or few for each cell of docs/attention-backends.md; other files go deeper.
"""

from collections.abc import Iterator

import pytest
import torch

from attention import LayerAttentionConfig
from attention.backends.base import GraphAttentionBackend
from attention.capability import BackendCapability
from attention.features import Feature
from attention.registry import ATTENTION_BACKENDS
from tests.gpu.attention.device_cases import (
    BF16_TOLERANCE,
    DECODE,
    EXTEND,
    FP8_TOLERANCE,
    FRESH,
    MIXED,
    capture,
    device_case,
    device_spec,
    e4m3_twin,
    oracle,
)
from tests.gpu.needs import NEEDS_GPU, needs_backend
from tests.proofs.cells import proves
from tests.unit.attention.account_cases import with_account
from tests.unit.attention.cases import AttentionCase, relative_error, rows_of

pytestmark = NEEDS_GPU

NAMES = (
    "fa3",
    "fa3_chunks",
    "fa3_deterministic",
    "fa3_fp8",
    "fa3_triton",
    "triton",
    "triton_deterministic",
    "triton_fp8",
    "trtllm_mha",
)
"""Those over K and V of heads whose kernels are there or compile within a second."""

DRAFTS = rows_of((40, 8), (5, 5), (300, 1), (1000, 16), (64, 3))
MANY_ROWS = rows_of(*[(40 + 7 * i, 1) for i in range(40)], (0, 300), (255, 9))
STEPS = {
    "decode": DECODE,
    "extend": EXTEND,
    "mixed": MIXED,
    "many": MANY_ROWS,
    "drafts": DRAFTS,
    "fresh": FRESH,
}
CHUNK = LayerAttentionConfig(chunk_size=256)
WINDOW = LayerAttentionConfig(sliding_window_size=24)
POISON = 1e4


def capability_of(name: str) -> BackendCapability:
    return ATTENTION_BACKENDS.get(name).capability


def layers_of(capability: BackendCapability) -> dict[str, LayerAttentionConfig]:
    """Each thing that a layer may ask for alone, and all together."""
    declared = {
        "window": (capability.has_sliding_window, WINDOW),
        "cap": (capability.has_logit_cap, LayerAttentionConfig(logit_cap=0.8)),
        "sinks": (capability.has_sinks, LayerAttentionConfig(has_sinks=True)),
        "chunks": (capability.has_chunked_attention, CHUNK),
    }
    layers = {name: layer for name, (is_there, layer) in declared.items() if is_there}
    together = LayerAttentionConfig(
        sliding_window_size=100 if capability.has_sliding_window else -1,
        logit_cap=1.5 if capability.has_logit_cap else 0.0,
        has_sinks=capability.has_sinks,
    )
    return {"plain": LayerAttentionConfig(), **layers, "together": together}


def param(name: str, *values: object, features: tuple[Feature, ...] = (), label: str) -> object:
    is_fp8 = torch.float8_e4m3fn in capability_of(name).kv_dtypes
    said = (*features, *([Feature.FP8_KV] if is_fp8 else []))
    marks = [needs_backend(name), proves(name, *said)]
    return pytest.param(name, *values, marks=marks, id=f"{name}-{label}")


def grid() -> Iterator[object]:
    """Every step of every kind of layer at the default page size; plain ones at both ends."""
    for name in NAMES:
        capability = capability_of(name)
        for kind, layer in layers_of(capability).items():
            for step, rows in STEPS.items():
                label = f"{kind}-{step}"
                yield param(name, layer, rows, capability.default_page_size, label=label)
        for page_size in {min(capability.page_sizes), max(capability.page_sizes)}:
            for step in ("decode", "extend"):
                layer, label = LayerAttentionConfig(), f"{page_size}-{step}"
                yield param(name, layer, STEPS[step], page_size, label=label)


def error_of(name: str, case: AttentionCase) -> float:
    """Against float64 over exact values."""
    backend = ATTENTION_BACKENDS.get(name)
    is_fp8 = torch.float8_e4m3fn in backend.capability.kv_dtypes
    own = e4m3_twin(case) if is_fp8 else case
    return relative_error(own.run(backend), oracle(case))


def tolerance_of(name: str) -> float:
    is_fp8 = torch.float8_e4m3fn in capability_of(name).kv_dtypes
    return FP8_TOLERANCE if is_fp8 else BF16_TOLERANCE


@pytest.mark.parametrize(("name", "layer", "rows", "page_size"), grid())
def test_every_layer_in_every_step(name, layer, rows, page_size):
    case = device_case(device_spec(rows, layer=layer, page_size=page_size))
    assert error_of(name, case) < tolerance_of(name)


def has_dims(capability: BackendCapability, k_dim: int, v_dim: int) -> bool:
    pairs = capability.unequal_head_dims
    return not pairs or any(k_dim in ks and v_dim in vs for ks, vs in pairs)


UNEQUAL = [
    param(name, *dims, features=(Feature.UNEQUAL_HEAD_DIMS,), label=f"{dims[0]}-{dims[1]}")
    for name in NAMES
    if capability_of(name).has_unequal_head_dims
    for dims in ((192, 128), (64, 256))
    if has_dims(capability_of(name), *dims)
]


@pytest.mark.parametrize(("name", "head_dim", "v_head_dim"), UNEQUAL)
def test_v_heads_of_another_size(name, head_dim, v_head_dim):
    for rows in STEPS.values():
        spec = device_spec(rows, page_size=64, head_dim=head_dim, v_head_dim=v_head_dim)
        assert error_of(name, device_case(spec)) < tolerance_of(name)


ACCOUNTS = [
    param(name, layer, features=(Feature.BOUNDED_ACCOUNTS,), label=label)
    for name in NAMES
    if capability_of(name).has_bounded_accounts
    for label, layer in layers_of(capability_of(name)).items()
    if label in ("window", "chunks")
]


@pytest.mark.parametrize(("name", "layer"), ACCOUNTS)
def test_tokens_that_were_given_back_are_in_no_output(name, layer):
    backend = ATTENTION_BACKENDS.get(name)
    for rows in STEPS.values():
        case = device_case(device_spec(rows, layer=layer, page_size=16))
        own = with_account(case)
        for buffer in own.token_to_kv_pool.get_kv_buffer(0):
            buffer.nan_to_num_(nan=POISON)
        assert relative_error(own.run(backend), oracle(case)) < BF16_TOLERANCE


GRAPHS = [
    param(name, layer, features=(Feature.GRAPHS, Feature.DECODE), label=label)
    for name in NAMES
    if issubclass(ATTENTION_BACKENDS.get(name), GraphAttentionBackend)
    for label, layer in layers_of(capability_of(name)).items()
]


@pytest.mark.parametrize(("name", "layer"), GRAPHS)
def test_replays_read_the_step_s_own_tables(name, layer):
    page_size = capability_of(name).default_page_size
    specs = [
        device_spec(DECODE, layer=layer, page_size=page_size, layout_seed=seed) for seed in range(2)
    ]
    exact = [device_case(spec) for spec in specs]
    is_fp8 = torch.float8_e4m3fn in capability_of(name).kv_dtypes
    own = [e4m3_twin(case) if is_fp8 else case for case in exact]
    step = capture(own[0], ATTENTION_BACKENDS.get(name), graph_bs=12)
    for case, twin in zip(exact, own, strict=True):
        assert relative_error(step.replay(twin), oracle(case)) < tolerance_of(name)
