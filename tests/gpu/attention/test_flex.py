"""The flex backend, compiled, on the device against float64.

A kernel takes torch seconds to compile, in each process of tests anew: a test has the steps that
share its kernels.
"""

from dataclasses import replace

import pytest
import torch
from torch._dynamo.utils import counters

from attention import LayerAttentionConfig
from attention.backends.flex import FlexAttentionBackend
from attention.features import Feature
from tests.gpu.attention.device_cases import (
    BF16_TOLERANCE,
    DECODE,
    EXTEND,
    FRESH,
    LAYERS,
    MIXED,
    STEPS,
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
from tests.unit.attention.visibility_cases import KINDS, build_visible

pytestmark = [
    *NEEDS_GPU,
    needs_backend("flex"),
    # torch's compiler has advice: TF32, softmax, its own modules.
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
CHUNKS = LayerAttentionConfig(chunk_size=100)
KINDS_OF_LAYERS = {**LAYERS, "chunks": CHUNKS}
DRAFTS = rows_of((40, 8), (5, 5), (300, 1), (1000, 16), (64, 3))
LONG_ITEMS = rows_of((40, 300), (0, 700), (300, 1))


@pytest.fixture(autouse=True)
def few_compilers():
    """In this process: a pool of processes for each would take longer to start."""
    with torch._inductor.config.patch(compile_threads=1):
        yield


def finite(case):
    """Pools hold numbers: masked values are multiplied by zero."""
    for buffer in case.token_to_kv_pool.get_kv_buffer(0):
        buffer.nan_to_num_(nan=1e4)
    return case


@proves("flex", Feature.DECODE, Feature.EXTEND, Feature.MIXED, Feature.VERIFY, page_size=64)
@pytest.mark.parametrize("layer", KINDS_OF_LAYERS.values(), ids=KINDS_OF_LAYERS.keys())
def test_every_layer_in_every_step(layer):
    for rows in (*STEPS.values(), DRAFTS):
        case = device_case(device_spec(rows, layer=layer, page_size=64))
        assert error_of(case, FlexAttentionBackend) < BF16_TOLERANCE


@proves("flex", Feature.WINDOW, Feature.CHUNKS, Feature.CAP, Feature.SINKS, page_size=64)
@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS.keys())
def test_every_kind_of_visibility(make):
    for name in ("plain", "window", "chunks", "everything"):
        for rows in (DRAFTS, LONG_ITEMS, DECODE):
            spec = device_spec(rows, layer=KINDS_OF_LAYERS[name], page_size=64)
            assert error_of(finite(build_visible(spec, make)), FlexAttentionBackend) < (
                BF16_TOLERANCE
            )


@proves("flex", Feature.DECODE, Feature.EXTEND)
@pytest.mark.parametrize("page_size", [16, 48, 128, 256])
def test_every_page_size(page_size):
    for rows in STEPS.values():
        case = device_case(device_spec(rows, page_size=page_size, layout_seed=page_size))
        assert error_of(case, FlexAttentionBackend) < BF16_TOLERANCE


@proves("flex", Feature.UNEQUAL_HEAD_DIMS)
@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "head_dim", "v_head_dim"),
    [(14, 2, 64, 64), (32, 1, 256, 256), (8, 8, 80, 80), (8, 2, 192, 128), (8, 2, 64, 256)],
)
def test_heads_of_every_size_and_number(q_heads, kv_heads, head_dim, v_head_dim):
    heads = {"q_heads": q_heads, "kv_heads": kv_heads}
    dims = {"head_dim": head_dim, "v_head_dim": v_head_dim}
    for rows in (DECODE, EXTEND, MIXED):
        case = device_case(device_spec(rows, page_size=64, **heads, **dims))
        assert error_of(case, FlexAttentionBackend) < BF16_TOLERANCE


@proves("flex", Feature.BOUNDED_ACCOUNTS, page_size=16)
def test_tokens_that_were_given_back_are_in_no_output():
    for layer in (LAYERS["window"], CHUNKS):
        for rows in STEPS.values():
            case = device_case(device_spec(rows, layer=layer, page_size=16))
            own = finite(with_account(case))
            assert relative_error(own.run(FlexAttentionBackend), oracle(case)) < BF16_TOLERANCE


@proves("flex", Feature.DECODE, Feature.EXTEND)
def test_steps_of_any_size_compile_nothing_and_wait_for_nothing():
    """After the first, whatever the rows, lengths, windows and pools."""
    half = {"dtype": torch.float16, "kv_dtype": torch.float16}
    heads = {"q_heads": 6, "kv_heads": 3, "page_size": 32, **half}
    first = device_case(device_spec(rows_of((9, 1)), **heads))
    assert error_of(first, FlexAttentionBackend) < BF16_TOLERANCE
    compiled = counters["stats"]["unique_graphs"]
    for number, rows in enumerate((DECODE, FRESH, MIXED, EXTEND, DRAFTS, rows_of((5000, 3)))):
        layer = (LAYERS["plain"], LAYERS["window"], CHUNKS)[number % 3]
        case = device_case(device_spec(rows, layer=layer, **heads))
        backend = FlexAttentionBackend(case.config, case.req_to_token_pool, case.token_to_kv_pool)
        assert error_of(case, FlexAttentionBackend) < BF16_TOLERANCE
        with no_waiting(), torch.inference_mode():
            backend.init_forward_metadata(case.batch)
            backend.forward(case.q, case.k, case.v, case.layer, case.batch)
    assert counters["stats"]["unique_graphs"] == compiled


def test_idle_and_padded_batches_give_no_nan():
    assert device_case(device_spec(())).run(FlexAttentionBackend).shape == (0, 8, 128)
    for layer in (LAYERS["plain"], LAYERS["sinks"]):
        case = device_case(device_spec(DECODE, layer=layer, page_size=64))
        lengths = case.batch.seq_lens_cpu.copy()
        lengths[[0, 4]] = 0
        batch = replace(case.batch, seq_lens_cpu=lengths, seq_lens=torch.from_numpy(lengths).cuda())
        out = replace(case, batch=batch).run(FlexAttentionBackend)
        assert not out[[0, 4]].any()
        kept = [i for i in range(len(DECODE)) if i not in (0, 4)]
        assert relative_error(out[kept], oracle(case)[kept]) < BF16_TOLERANCE
