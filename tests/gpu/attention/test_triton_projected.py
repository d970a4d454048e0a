"""Decode from the QKV projection on: what is attended and what is stored, against float64."""

from dataclasses import replace

import pytest
import torch

from attention import LayerAttentionConfig
from attention.backends.flash_attention_triton import TritonDecodeFlashAttentionBackend
from attention.features import Feature
from attention.kernels.decode_shape import DecodeGeometry, DecodeTuning, measured_tuning
from attention.qkv_projection import HeadNorm, QKVProjection
from tests.fakes.qkv_projection import draw_projection, finish
from tests.gpu.attention.device_cases import (
    BF16_TOLERANCE,
    DECODE,
    LAYERS,
    LAYERS_AND_PAGES,
    blank_decode_batch,
    device_spec,
    oracle,
    padded,
)
from tests.gpu.needs import NEEDS_FA3, NEEDS_GPU
from tests.proofs.cells import proves
from tests.unit.attention.cases import (
    AttentionCase,
    CaseSpec,
    build_case,
    relative_error,
    rows_of,
)

pytestmark = [*NEEDS_GPU, NEEDS_FA3]

UNLIKE = rows_of((20000, 1), (5, 1), (4095, 1), (0, 1), (127, 1), (128, 1), (9000, 1), (64, 1))
FRONTS = {
    "one split": (1, torch.bfloat16, False),
    "splits, bias, norm": (4, torch.float32, True),
    "splits, bias, norm rounded once": (3, torch.float32, True),
}


def projection_of(case: AttentionCase, front: str, num_rows: int) -> QKVProjection:
    spec = case.spec
    num_splits, partial_dtype, has_extras = FRONTS[front]
    width = (spec.q_heads + 2 * spec.kv_heads) * spec.head_dim
    projection = draw_projection(
        (num_splits, num_rows, width),
        spec.head_dim,
        case.config.max_context_len,
        dtype=spec.dtype,
        partial_dtype=partial_dtype,
        has_extras=has_extras,
        device=spec.device,
    )
    norm = projection.rotation.head_norm
    if norm is None or "rounded once" not in front:
        return projection
    # Scales of float32, as Gemma's: the model's dtype could not hold them.
    wide = HeadNorm(norm.q_weight.float() * 1.003, norm.k_weight.float() * 1.003, norm.eps)
    return replace(projection, rotation=replace(projection.rotation, head_norm=wide))


def forget_new_tokens(case: AttentionCase) -> None:
    for buffer in case.token_to_kv_pool.get_kv_buffer(0):
        buffer.flatten(0, 1)[case.batch.out_cache_loc] = torch.nan


class OtherwiseTunedBackend(TritonDecodeFlashAttentionBackend):
    """The chunk's first block loaded before the projection is there, if it is not so anyway."""

    @staticmethod
    def tuning_of(geometry: DecodeGeometry, num_rows: int) -> DecodeTuning:
        tuning = measured_tuning(geometry, num_rows)
        return replace(tuning, loads_early=not tuning.loads_early)


BACKENDS = [TritonDecodeFlashAttentionBackend, OtherwiseTunedBackend]


def attend(
    case: AttentionCase,
    projection: QKVProjection,
    backend_class: type[TritonDecodeFlashAttentionBackend],
) -> torch.Tensor:
    backend = backend_class(case.config, case.req_to_token_pool, case.token_to_kv_pool)
    assert backend.fuses_decode_projection(1)
    batch = replace(case.batch, attn_backend=backend)
    backend.init_forward_metadata(batch)
    # An ordinary launch, as the embedding lookup is one between a step's tables and its layers.
    projection.partials.add_(0.0)
    out = case.layer.forward_projected(projection, batch)
    return out.view(batch.num_tokens, case.spec.q_heads, case.spec.head_dim)


def check(
    spec: CaseSpec,
    front: str,
    backend_class: type[TritonDecodeFlashAttentionBackend] = TritonDecodeFlashAttentionBackend,
) -> None:
    """One step: outputs, and the whole pool, stale places included."""
    case = build_case(spec)
    projection = projection_of(case, front, len(spec.rows))
    positions = case.batch.positions
    exact = finish(projection, positions, spec.q_heads, spec.kv_heads)
    q, k, v = (part.to(spec.dtype) for part in exact)
    expected = oracle(replace(case, q=q, k=k, v=v))
    before = [buffer.clone() for buffer in case.token_to_kv_pool.get_kv_buffer(0)]
    forget_new_tokens(case)
    out = attend(case, projection, backend_class)
    assert relative_error(out, expected) < BF16_TOLERANCE
    places = case.batch.out_cache_loc
    for old, new, part in zip(
        before, case.token_to_kv_pool.get_kv_buffer(0), exact[1:], strict=True
    ):
        assert relative_error(new.flatten(0, 1)[places], part) < BF16_TOLERANCE
        new.flatten(0, 1)[places] = old.flatten(0, 1)[places]
        assert torch.equal(old.nan_to_num(nan=9.0), new.nan_to_num(nan=9.0))


@proves("fa3_triton", Feature.DECODE)
@pytest.mark.parametrize(("layer", "page_size"), LAYERS_AND_PAGES)
def test_every_kind_of_layer_at_every_page_size(layer, page_size):
    """Every kind behind either front: kernels of a page size are compiled for each."""
    front = "one split" if page_size == 16 else "splits, bias, norm"
    spec = device_spec(DECODE, layer=layer, page_size=page_size, layout_seed=page_size)
    check(spec, front)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(("q_heads", "kv_heads"), [(8, 8), (16, 8), (32, 8), (14, 2), (16, 1)])
def test_every_gqa_ratio_and_head_dim(q_heads, kv_heads, head_dim):
    spec = device_spec(
        DECODE, q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim, v_head_dim=head_dim
    )
    check(spec, "splits, bias, norm")


@pytest.mark.parametrize(
    "layer",
    [
        LayerAttentionConfig(),
        LayerAttentionConfig(sliding_window_size=1024),
        LayerAttentionConfig(sliding_window_size=1000, logit_cap=50.0),
    ],
    ids=str,
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_gemmas_heads(layer, backend):
    """Of 256 elements, two queries a key: over rows of unlike lengths, with windows and caps."""
    shape = {"q_heads": 16, "kv_heads": 8, "head_dim": 256, "v_head_dim": 256}
    spec = device_spec(UNLIKE, page_size=128, layer=layer, **shape)
    check(spec, "splits, bias, norm rounded once", backend)


@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize(("window", "page_size"), [(-1, 128), (64, 1), (1000, 128)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_unlike_rows_are_cut_and_joined(page_size, window, front, backend):
    layer = LayerAttentionConfig(sliding_window_size=window, has_sinks=True)
    spec = device_spec(UNLIKE, page_size=page_size, q_heads=32, kv_heads=8, layer=layer)
    check(spec, front, backend)


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS.keys())
def test_every_kind_of_layer_tuned_otherwise(layer):
    check(device_spec(DECODE, layer=layer), "splits, bias, norm", OtherwiseTunedBackend)


@pytest.mark.parametrize("page_size", [16, 128])
@pytest.mark.parametrize("num_rows", [17, 150])
def test_many_rows(num_rows, page_size):
    rows = rows_of(*[(37 * i % 901, 1) for i in range(num_rows)])
    check(device_spec(rows, q_heads=32, kv_heads=8, page_size=page_size), "splits, bias, norm")


def test_float16():
    check(device_spec(DECODE, dtype=torch.float16, kv_dtype=torch.float16), "splits, bias, norm")


def test_many_layers_of_one_plan_give_the_same_bits():
    """Counters are back at zero after every layer, and joining does not depend on who is last."""
    case = build_case(device_spec(UNLIKE, q_heads=32, kv_heads=8, page_size=128))
    projection = projection_of(case, "splits, bias, norm", len(UNLIKE))
    backend = TritonDecodeFlashAttentionBackend(
        case.config, case.req_to_token_pool, case.token_to_kv_pool
    )
    batch = replace(case.batch, attn_backend=backend)
    backend.init_forward_metadata(batch)
    projection.partials.add_(0.0)
    outs = [case.layer.forward_projected(projection, batch).clone() for _ in range(60)]
    assert not outs[0].isnan().any()
    assert all(torch.equal(out, outs[0]) for out in outs)


@pytest.mark.parametrize("page_size", [1, 64, 128])
def test_replays_follow_shuffled_pages_and_padding_gives_zeros(page_size):
    cases = [
        build_case(device_spec(DECODE, page_size=page_size, layout_seed=seed)) for seed in range(3)
    ]
    first, num_rows, graph_bs = cases[0], len(DECODE), 12
    backend = TritonDecodeFlashAttentionBackend(
        first.config, first.req_to_token_pool, first.token_to_kv_pool
    )
    backend.init_cuda_graph_state(graph_bs)
    batch = replace(blank_decode_batch(graph_bs, first.spec.device), attn_backend=backend)
    projection = projection_of(first, "splits, bias, norm", graph_bs)
    backend.init_forward_metadata_capture_cuda_graph(batch)

    def run() -> torch.Tensor:
        backend.record_step_tables(batch)
        projection.partials.add_(0.0)
        return case.layer.forward_projected(projection, batch)

    case = first
    with torch.inference_mode():
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run()
    for case in cases:
        positions = torch.zeros(graph_bs, dtype=torch.int64, device=first.spec.device)
        positions[:num_rows] = case.batch.positions
        exact = finish(projection, positions, first.spec.q_heads, first.spec.kv_heads)
        q, k, v = (part.to(first.spec.dtype)[:num_rows] for part in exact)
        expected = oracle(replace(case, q=q, k=k, v=v))
        forget_new_tokens(case)
        if case is not first:
            pools = first.token_to_kv_pool, case.token_to_kv_pool
            for to, source in zip(*(pool.get_kv_buffer(0) for pool in pools), strict=True):
                to.copy_(source)
            table = case.req_to_token_pool.req_to_token
            first.req_to_token_pool.req_to_token.copy_(table)
        step = padded(case.batch, graph_bs)
        for name in ("out_cache_loc", "req_pool_indices", "seq_lens", "extend_seq_lens"):
            getattr(batch, name).copy_(getattr(step, name))
        graph.replay()
        replayed = out.view(graph_bs, first.spec.q_heads, -1)
        assert relative_error(replayed[:num_rows], expected) < BF16_TOLERANCE
        assert not replayed[num_rows:].any()
