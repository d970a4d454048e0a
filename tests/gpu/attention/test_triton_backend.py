"""The triton backends on the device against float64, with NaN wherever nobody wrote.

On every GPU: nothing here needs FlashAttention.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from attention import LayerAttentionConfig
from attention.backends.triton_fp8 import Fp8TritonBackend
from attention.backends.triton_latent import TritonLatentBackend
from attention.backends.triton_paged import TritonBackend
from attention.features import Feature
from tests.gpu.attention.device_cases import (
    BF16_TOLERANCE,
    DECODE,
    EXTEND,
    FP8_TOLERANCE,
    FRESH,
    LAYERS,
    LAYERS_AND_PAGES,
    MIXED,
    STEPS,
    capture,
    device_case,
    device_spec,
    e4m3_twin,
    error_of,
    oracle,
)
from tests.gpu.needs import NEEDS_GPU
from tests.gpu.no_waiting import no_waiting
from tests.proofs.cells import proves
from tests.unit.attention.cases import (
    CaseSpec,
    RowSpec,
    build_case,
    relative_error,
    rows_of,
)
from tests.unit.attention.latent_cases import DEEPSEEK, build_latent_case
from tests.unit.attention.visibility_cases import KINDS, build_visible, fields_of

pytestmark = NEEDS_GPU

LATENT_TOLERANCE = 1.5e-2
DRAFTS = rows_of((40, 8), (0, 5), (300, 1), (1000, 16), (64, 3))
LONG_ITEMS = rows_of((40, 300), (0, 700), (300, 1))
HEAD_DIMS = [*[(dim, dim) for dim in (32, 64, 80, 96, 128, 192, 256)], (192, 128), (64, 256)]
RATIOS = [(8, 8), (8, 2), (14, 2), (32, 1)]
HEADS = [
    (*RATIOS[(index + turn) % len(RATIOS)], *dims)
    for index, dims in enumerate(HEAD_DIMS)
    for turn in (0, 2)
]
"""(query heads, KV heads, head dim, V head dim): each dim with two ratios, each ratio with some
dims. Each is compiled, which takes as long as many steps."""
COMMON_STEPS = [pytest.param(DECODE, id="decode"), pytest.param(MIXED, id="mixed")]
CUT = tuple(RowSpec(17 * (i % 29) + 1, 1, i % 7) for i in range(40)) + rows_of((0, 300), (255, 9))


@proves("triton")
@pytest.mark.parametrize(("layer", "page_size"), LAYERS_AND_PAGES)
@pytest.mark.parametrize("rows", [*COMMON_STEPS, pytest.param(EXTEND, id="extend")])
def test_every_kind_of_layer_at_every_page_size(rows, layer, page_size):
    spec = device_spec(rows, layer=layer, page_size=page_size, layout_seed=page_size)
    assert error_of(build_case(spec), TritonBackend) < BF16_TOLERANCE


@proves("triton", Feature.UNEQUAL_HEAD_DIMS)
@pytest.mark.parametrize(("q_heads", "kv_heads", "head_dim", "v_head_dim"), HEADS)
@pytest.mark.parametrize("rows", COMMON_STEPS)
def test_every_gqa_ratio_and_head_dim(rows, q_heads, kv_heads, head_dim, v_head_dim):
    heads = {"q_heads": q_heads, "kv_heads": kv_heads}
    spec = device_spec(rows, page_size=64, head_dim=head_dim, v_head_dim=v_head_dim, **heads)
    assert error_of(build_case(spec), TritonBackend) < BF16_TOLERANCE


@pytest.mark.parametrize("page_size", [24, 64])
@pytest.mark.parametrize("rows", STEPS.values(), ids=STEPS.keys())
def test_float16_and_an_odd_page_size(rows, page_size):
    spec = device_spec(rows, page_size=page_size, dtype=torch.float16, kv_dtype=torch.float16)
    assert error_of(build_case(spec), TritonBackend) < BF16_TOLERANCE


@pytest.mark.parametrize("page_size", [1, 64])
def test_long_rows_of_llama_3_8b_heads(page_size):
    rows = rows_of((8000, 1), (5, 1), (4095, 1), (6000, 700), (0, 2048), (1, 1))
    spec = device_spec(rows, page_size=page_size, q_heads=32, kv_heads=8)
    assert error_of(build_case(spec), TritonBackend) < BF16_TOLERANCE


@pytest.mark.parametrize("layer", [LAYERS["plain"], LAYERS["everything"]], ids=["plain", "all"])
def test_few_new_tokens_on_a_long_prefix_are_split_over_the_device(layer):
    for rows in (rows_of((8000, 4)), rows_of((20000, 8), (3, 2)), rows_of((900, 33))):
        case = build_case(device_spec(rows, layer=layer, q_heads=32, kv_heads=8))
        assert error_of(case, TritonBackend) < BF16_TOLERANCE


def test_many_decode_rows_of_a_mixed_step_take_the_decode_kernels():
    case = build_case(device_spec(CUT))
    assert error_of(case, TritonBackend) < BF16_TOLERANCE
    wanted = torch.empty((len(case.q), 8 * 128), dtype=torch.bfloat16, device="cuda")
    batch = replace(case.batch, attention_out=wanted)
    out = replace(case, batch=batch).run(TritonBackend)
    assert out.data_ptr() == wanted.data_ptr()
    assert relative_error(out, oracle(case)) < BF16_TOLERANCE


@proves("triton")
@pytest.mark.parametrize(
    ("rows", "layer"),
    [
        *[pytest.param(DRAFTS, layer, id=f"drafts-{name}") for name, layer in LAYERS.items()],
        pytest.param(EXTEND, LAYERS["everything"], id="extend-everything"),
        pytest.param(LONG_ITEMS, LAYERS["everything"], id="items-everything"),
    ],
)
@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS.keys())
def test_every_kind_of_visibility(make, rows, layer):
    case = build_visible(device_spec(rows, layer=layer), make)
    assert error_of(case, TritonBackend) < BF16_TOLERANCE


@proves("triton")
@pytest.mark.parametrize(("page_size", "kv_heads"), [(1, 8), (16, 1), (64, 8), (256, 1)])
@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS.keys())
def test_every_kind_of_visibility_at_every_page_size(make, kv_heads, page_size):
    case = build_visible(device_spec(DRAFTS, kv_heads=kv_heads, page_size=page_size), make)
    assert error_of(case, TritonBackend) < BF16_TOLERANCE


def test_padding_rows_without_keys_give_zeros():
    for v_head_dim in (128, 64):
        case = build_case(device_spec(DECODE, v_head_dim=v_head_dim))
        lengths = case.batch.seq_lens_cpu.copy()
        lengths[[0, 4]] = 0
        batch = replace(case.batch, seq_lens_cpu=lengths, seq_lens=torch.from_numpy(lengths).cuda())
        out = replace(case, batch=batch).run(TritonBackend)
        assert not out[[0, 4]].any()
        kept = [i for i in range(len(DECODE)) if i not in (0, 4)]
        assert relative_error(out[kept], oracle(case)[kept]) < BF16_TOLERANCE


def test_idle_batch_gives_an_empty_result():
    assert build_case(device_spec(())).run(TritonBackend).shape == (0, 8, 128)


@proves("triton", Feature.GRAPHS, Feature.DECODE)
@pytest.mark.parametrize(
    ("v_head_dim", "layer", "page_size"),
    [
        *[pytest.param(128, *one.values, id=one.id) for one in LAYERS_AND_PAGES],
        *[pytest.param(64, LAYERS[name], 64, id=f"short_v-{name}") for name in LAYERS],
    ],
)
def test_replays_follow_shuffled_pages(v_head_dim, layer, page_size):
    heads = {"v_head_dim": v_head_dim, "page_size": page_size}
    cases = [
        device_case(device_spec(DECODE, layer=layer, layout_seed=seed, **heads))
        for seed in range(3)
    ]
    step = capture(cases[0], TritonBackend, graph_bs=12)
    for case in cases:
        assert relative_error(step.replay(case), oracle(case)) < BF16_TOLERANCE


@pytest.mark.parametrize("rows", [DECODE, rows_of((3, 40), (100, 1)), CUT])
def test_nothing_waits_for_the_device(rows):
    case = device_case(device_spec(rows))
    backend = TritonBackend(case.config, case.req_to_token_pool, case.token_to_kv_pool)
    assert error_of(case, TritonBackend) < BF16_TOLERANCE
    with no_waiting():
        backend.init_forward_metadata(case.batch)
        backend.forward(case.q, case.k, case.v, case.layer, case.batch)


@proves("triton_fp8", Feature.FP8_KV)
@pytest.mark.parametrize("page_size", [1, 16, 64, 256])
@pytest.mark.parametrize("layer", [LAYERS["plain"], LAYERS["everything"]], ids=["plain", "all"])
@pytest.mark.parametrize("rows", COMMON_STEPS)
def test_fp8_cache_agrees_with_exact_values(rows, layer, page_size):
    case = device_case(device_spec(rows, layer=layer, page_size=page_size))
    assert relative_error(e4m3_twin(case).run(Fp8TritonBackend), oracle(case)) < FP8_TOLERANCE


@proves("triton_fp8", Feature.FP8_KV)
@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS.keys())
def test_fp8_cache_with_every_kind_of_visibility(make):
    case = device_case(device_spec(DRAFTS))
    visible = build_visible(case.spec, make)
    case = replace(case, batch=visible.batch)
    assert relative_error(e4m3_twin(case).run(Fp8TritonBackend), oracle(case)) < FP8_TOLERANCE


@proves("triton_fp8", Feature.FP8_KV, Feature.GRAPHS, Feature.DECODE)
def test_fp8_replays_follow_shuffled_pages():
    exact = [device_case(device_spec(DECODE, layout_seed=seed)) for seed in range(2)]
    twins = [e4m3_twin(case) for case in exact]
    step = capture(twins[0], Fp8TritonBackend, graph_bs=9)
    for case, twin in zip(exact, twins, strict=True):
        assert relative_error(step.replay(twin), oracle(case)) < FP8_TOLERANCE


def latent_case(rows, dims=DEEPSEEK, **changes):
    half = {"dtype": torch.bfloat16, "kv_dtype": torch.bfloat16}
    return build_latent_case(CaseSpec(rows, device=torch.device("cuda"), **half, **changes), dims)


def run_latent(case):
    return case.run(TritonLatentBackend(case.config, case.table, case.pool))


@proves("triton", Feature.MLA)
@pytest.mark.parametrize(
    ("rows", "page_size"),
    [*[(rows, 64) for rows in (DECODE, EXTEND, FRESH)], *[(MIXED, n) for n in (1, 16, 64, 128)]],
)
def test_latents_at_every_page_size(rows, page_size):
    case = latent_case(rows, page_size=page_size, layout_seed=page_size)
    assert relative_error(run_latent(case), case.run_oracle()) < LATENT_TOLERANCE


@proves("triton", Feature.MLA, Feature.DECODE)
@pytest.mark.parametrize("num_heads", [8, 32, 128])
def test_latents_of_any_number_of_heads(num_heads):
    case = latent_case(DECODE, replace(DEEPSEEK, num_heads=num_heads))
    assert relative_error(run_latent(case), case.run_oracle()) < LATENT_TOLERANCE


@proves("triton", Feature.MLA)
@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS.keys())
def test_latents_with_every_kind_of_visibility(make):
    case = latent_case(DRAFTS)
    fields = fields_of(case.spec, *make(case.spec, np.random.default_rng(1)))
    case = replace(case, batch=replace(case.batch, **fields))
    assert relative_error(run_latent(case), case.run_oracle()) < LATENT_TOLERANCE


@pytest.mark.parametrize("window", [-1, 64])
def test_results_are_the_same_bits_every_time(window):
    layer = LayerAttentionConfig(sliding_window_size=window)
    rows = rows_of((9000, 4), (3, 1), (2500, 2))
    case = build_case(device_spec(rows, q_heads=32, kv_heads=8, layer=layer))
    first = case.run(TritonBackend)
    for _ in range(20):
        assert torch.equal(case.run(TritonBackend), first)
