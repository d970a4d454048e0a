"""The fa4 backend on the device against float64.

Each kind of layer takes the package seconds to compile, in each process of tests anew: a test has
the steps that share its kernels.
"""

import inspect
from dataclasses import replace

import pytest
import torch

from attention.backends.flash_attention_4 import FlashAttention4Backend
from attention.features import Feature
from attention.kernels.providers import load_flash_attention_4
from tests.fakes.flash_attention_4 import flash_attn_varlen_func
from tests.gpu.attention.device_cases import (
    BF16_TOLERANCE,
    DECODE,
    EXTEND,
    LAYERS,
    MIXED,
    STEPS,
    capture,
    device_case,
    device_spec,
    error_of,
    oracle,
)
from tests.gpu.needs import NEEDS_GPU, needs_backend
from tests.gpu.no_waiting import no_waiting
from tests.proofs.cells import proves
from tests.unit.attention.account_cases import with_account
from tests.unit.attention.cases import relative_error, rows_of

pytestmark = [
    *NEEDS_GPU,
    needs_backend("fa4"),
    # The package's compiler warns of its own Python.
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
DRAFTS = rows_of((40, 8), (5, 5), (300, 1), (1000, 16), (64, 3))


def test_the_stand_in_s_signature_is_the_package_s():
    def parameters(function):
        return [(name, one.default) for name, one in inspect.signature(function).parameters.items()]

    assert parameters(load_flash_attention_4().attend) == parameters(flash_attn_varlen_func)


@proves("fa4", Feature.DECODE, Feature.EXTEND, Feature.MIXED, Feature.VERIFY, page_size=128)
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS.keys())
def test_every_layer_in_every_step(layer):
    for rows in (*STEPS.values(), DRAFTS):
        case = device_case(device_spec(rows, layer=layer, page_size=128))
        assert error_of(case, FlashAttention4Backend) < BF16_TOLERANCE


@proves("fa4", page_size=1)
@proves("fa4", page_size=16)
@proves("fa4", page_size=64)
@proves("fa4", page_size=256)
@pytest.mark.parametrize("layer", [LAYERS["plain"], LAYERS["everything"]], ids=["plain", "all"])
def test_every_page_size(layer):
    """One kernel loads pages of all sizes but that of its tiles."""
    for page_size in (1, 16, 64, 256):
        for rows in STEPS.values():
            spec = device_spec(rows, layer=layer, page_size=page_size, layout_seed=page_size)
            assert error_of(device_case(spec), FlashAttention4Backend) < BF16_TOLERANCE


@proves("fa4", Feature.UNEQUAL_HEAD_DIMS, page_size=64)
@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "head_dim", "v_head_dim"),
    [(14, 2, 64, 64), (32, 1, 128, 128), (8, 8, 80, 80), (8, 2, 128, 64)],
)
def test_heads_of_every_size_and_number(q_heads, kv_heads, head_dim, v_head_dim):
    heads = {"q_heads": q_heads, "kv_heads": kv_heads}
    dims = {"head_dim": head_dim, "v_head_dim": v_head_dim}
    for rows in (DECODE, EXTEND, MIXED):
        case = device_case(device_spec(rows, page_size=64, **heads, **dims))
        assert error_of(case, FlashAttention4Backend) < BF16_TOLERANCE


@proves("fa4", Feature.BOUNDED_ACCOUNTS, page_size=16)
def test_tokens_that_were_given_back_are_in_no_output():
    for rows in STEPS.values():
        case = device_case(device_spec(rows, layer=LAYERS["window"], page_size=16))
        own = with_account(case)
        for buffer in own.token_to_kv_pool.get_kv_buffer(0):
            buffer.nan_to_num_(nan=1e4)
        assert relative_error(own.run(FlashAttention4Backend), oracle(case)) < BF16_TOLERANCE


@proves("fa4", Feature.GRAPHS, Feature.DECODE, page_size=128)
@pytest.mark.parametrize("layer", [LAYERS["plain"], LAYERS["everything"]], ids=["plain", "all"])
def test_replays_follow_shuffled_pages(layer):
    """Of a graph with three rows of padding."""
    cases = [
        device_case(device_spec(DECODE, layer=layer, page_size=128, layout_seed=seed))
        for seed in range(2)
    ]
    step = capture(cases[0], FlashAttention4Backend, graph_bs=12)
    for case in cases:
        assert relative_error(step.replay(case), oracle(case)) < BF16_TOLERANCE
        assert step.out.isfinite().all()


def test_float16_and_padding_and_nothing_that_waits():
    half = {"dtype": torch.float16, "kv_dtype": torch.float16, "page_size": 64}
    case = device_case(device_spec(DECODE, **half))
    lengths = case.batch.seq_lens_cpu.copy()
    lengths[[0, 4]] = 0
    batch = replace(case.batch, seq_lens_cpu=lengths, seq_lens=torch.from_numpy(lengths).cuda())
    out = replace(case, batch=batch).run(FlashAttention4Backend)
    assert out.isfinite().all()
    kept = [i for i in range(len(DECODE)) if i not in (0, 4)]
    assert relative_error(out[kept], oracle(case)[kept]) < BF16_TOLERANCE
    backend = FlashAttention4Backend(case.config, case.req_to_token_pool, case.token_to_kv_pool)
    with no_waiting(), torch.inference_mode():
        backend.init_forward_metadata(case.batch)
        backend.forward(case.q, case.k, case.v, case.layer, case.batch)
