"""Deterministic backends: a token's attention has the same bits however its row is computed."""

import pytest
import torch

from attention import LayerAttentionConfig
from attention.backends.flash_attention import DeterministicFlashAttentionBackend
from attention.backends.triton_deterministic import DeterministicTritonBackend
from attention.features import Feature
from tests.gpu.attention.device_cases import (
    BF16_TOLERANCE,
    LAYERS,
    capture,
    device_case,
    device_spec,
    error_of,
)
from tests.gpu.needs import NEEDS_FA3, NEEDS_GPU
from tests.proofs.cells import proves
from tests.unit.attention.cases import RowSpec, rows_of

pytestmark = NEEDS_GPU

BACKENDS = [
    pytest.param(DeterministicFlashAttentionBackend, id="fa3", marks=NEEDS_FA3),
    pytest.param(DeterministicTritonBackend, id="triton"),
]
NUM_TOKENS = 700
SEED = 77
CUTS = (699, 640, 513, 383, 129, 64, 1)
WIDE_WINDOW = LayerAttentionConfig(sliding_window_size=200, logit_cap=1.5)
CAPPED_WITH_SINKS = LayerAttentionConfig(logit_cap=1.5, has_sinks=True)
FULL = {"plain": LAYERS["plain"], "capped_with_sinks": CAPPED_WITH_SINKS}
WINDOWED = {
    "window": LAYERS["window"],
    "wide_window": WIDE_WINDOW,
    "everything": LAYERS["everything"],
}
KINDS = [
    pytest.param(*backend.values, layer, id=f"{backend.id}-{name}", marks=backend.marks)
    for backend in BACKENDS
    for name, layer in {**FULL, **WINDOWED}.items()
    if name in FULL or backend.values[0].capability.has_sliding_window
]
COMPANY = rows_of((40, 1), (0, 300), (1900, 1), (17, 9), (0, 1))


@proves(Feature.DETERMINISTIC)
@pytest.mark.parametrize("page_size", [16, 128])
@pytest.mark.parametrize(("backend", "layer"), KINDS)
def test_bits_depend_on_no_company_and_no_cut(backend, layer, page_size):
    def run(*rows):
        case = device_case(device_spec(rows, layer=layer, page_size=page_size))
        return case.by_row(case.run(backend))

    (whole,) = run(RowSpec(0, NUM_TOKENS, SEED))
    for cut in CUTS:
        row = RowSpec(cut, NUM_TOKENS - cut, SEED)
        for rows in ((row,), (*COMPANY[:2], row, *COMPANY[2:])):
            out = run(*rows)[rows.index(row)]
            assert torch.equal(out, whole[cut:]), (cut, len(rows))


@proves(Feature.DETERMINISTIC, Feature.GRAPHS)
@pytest.mark.parametrize(("backend", "layer"), KINDS)
def test_graphs_have_the_bits_of_prompts(backend, layer):
    """Rows in a captured step, padded, beside the last token of the same rows as prompts."""
    lengths = (300, 17, 1300, 640)
    decode = tuple(RowSpec(n - 1, 1, seed) for seed, n in enumerate(lengths))
    case = device_case(device_spec(decode, layer=layer, page_size=64))
    out = capture(case, backend, 6).replay(case)
    for seed, n in enumerate(lengths):
        prompt = device_case(device_spec((RowSpec(0, n, seed),), layer=layer, page_size=64))
        assert torch.equal(out[seed], prompt.run(backend)[-1])


@pytest.mark.parametrize("head_dim", [64, 256])
@pytest.mark.parametrize("backend", BACKENDS)
def test_other_heads_agree_with_the_oracle_and_keep_their_bits(backend, head_dim):
    heads = {"head_dim": head_dim, "v_head_dim": head_dim, "kv_heads": 4}
    case = device_case(device_spec(COMPANY, **heads))
    assert error_of(case, backend) < BF16_TOLERANCE
    whole = device_case(device_spec((RowSpec(0, 520, SEED),), **heads)).run(backend)
    for cut in (519, 130):
        cut_case = device_case(device_spec((RowSpec(cut, 520 - cut, SEED),), **heads))
        assert torch.equal(cut_case.run(backend), whole[cut:])
