"""The flex backend on CPU: its tiles, masks and lists of pages against the oracle.

Most cases run on a stand-in that reads listed pages only, as the compiled kernel does; some by
torch's flex_attention, unfused, which reads masks only.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from attention import LayerAttentionConfig
from attention.backends import flex
from attention.backends.flex import FlexAttentionBackend
from attention.capability import AttentionBackendError
from attention.kernels.flex_kernel import FlexKernel
from attention.kernels.flex_tiles import TILE_ROWS, cut_step
from attention.memory.req_to_token_pool import ReqToTokenPool
from attention.preferences import DeviceFacts
from attention.selection import AttentionNeeds, select_attention_backend
from attention.visibility import VisibilityKind
from tests.fakes.flex import ListedPagesKernel
from tests.unit.attention.account_cases import windowed, with_account
from tests.unit.attention.cases import CaseSpec, RowSpec, build_case, relative_error, rows_of
from tests.unit.attention.visibility_cases import KINDS, build_visible

# torch tells everybody to compile it.
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
TOLERANCE = 1e-5
CPU = torch.device("cpu")

DECODE = rows_of((0, 1), (1, 1), (15, 1), (16, 1), (300, 1), (64, 1))
EXTEND = rows_of((0, 5), (7, 130), (128, 2), (33, 16))
MIXED = rows_of((40, 1), (0, 300), (255, 1), (17, 9), (0, 1))
SHORT = rows_of((0, 1), (15, 1), (16, 1), (64, 1))
DRAFTS = rows_of((7, 5), (0, 9), (20, 1), (0, 1), (3, 0), (40, 17))
STEPS = {"decode": DECODE, "extend": EXTEND, "mixed": MIXED, "one": rows_of((40, 1))}
LAYERS = {
    "plain": LayerAttentionConfig(),
    "window": LayerAttentionConfig(sliding_window_size=24),
    "window_of_one": LayerAttentionConfig(sliding_window_size=1),
    "chunks": LayerAttentionConfig(chunk_size=24),
    "cap": LayerAttentionConfig(logit_cap=0.8),
    "sinks": LayerAttentionConfig(has_sinks=True),
    "all": LayerAttentionConfig(sliding_window_size=100, logit_cap=1.5, has_sinks=True),
}


@pytest.fixture
def listed(monkeypatch):
    monkeypatch.setattr(flex, "unfused_kernel", ListedPagesKernel)


def finite(case):
    """Pools hold numbers: masked values are multiplied by zero."""
    for buffer in case.token_to_kv_pool.get_kv_buffer(0):
        buffer.nan_to_num_(nan=1e4)
    return case


def backend_of(case):
    return FlexAttentionBackend(case.config, case.req_to_token_pool, case.token_to_kv_pool)


def run(case, backend, batch):
    backend.init_forward_metadata(batch)
    with torch.inference_mode():
        return backend.forward(case.q, case.k, case.v, case.layer, batch)


def error_of(case):
    return relative_error(finite(case).run(FlexAttentionBackend), case.run_oracle())


@pytest.mark.usefixtures("listed")
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS.keys())
@pytest.mark.parametrize("rows", STEPS.values(), ids=STEPS.keys())
def test_every_layer_in_every_step(rows, layer):
    assert error_of(build_case(CaseSpec(rows, 16, layer=layer))) < TOLERANCE


@pytest.mark.usefixtures("listed")
@pytest.mark.parametrize("layer", [LAYERS["all"], LAYERS["chunks"]], ids=["all", "chunks"])
@pytest.mark.parametrize("rows", STEPS.values(), ids=STEPS.keys())
@pytest.mark.parametrize("page_size", [48, 256])
def test_every_page_size_in_every_step(rows, layer, page_size):
    assert error_of(build_case(CaseSpec(rows, page_size, layer=layer))) < TOLERANCE


@pytest.mark.usefixtures("listed")
@pytest.mark.parametrize("layer", ["plain", "window", "chunks", "all"])
@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS.keys())
def test_every_kind_of_visibility(make, layer):
    """Few tokens, and more than a tile has of a row."""
    for rows in (DRAFTS, rows_of((30, 130), (5, 1))):
        spec = CaseSpec(rows, q_heads=4, kv_heads=2, layer=LAYERS[layer])
        assert error_of(build_visible(spec, make)) < TOLERANCE


@pytest.mark.usefixtures("listed")
@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS.keys())
def test_every_kind_of_visibility_of_single_tokens(make):
    assert error_of(build_visible(CaseSpec(DECODE, layer=LAYERS["all"]), make)) < TOLERANCE


@pytest.mark.usefixtures("listed")
@pytest.mark.parametrize(("q_heads", "kv_heads"), [(8, 8), (8, 1), (14, 2), (71, 1)])
def test_any_number_of_heads_shares_a_kv_head(q_heads, kv_heads):
    """Among them such as no tile is a multiple of."""
    for rows in (DECODE, DRAFTS, MIXED):
        spec = CaseSpec(rows, q_heads=q_heads, kv_heads=kv_heads, v_head_dim=16)
        assert error_of(build_case(spec)) < TOLERANCE


@pytest.mark.parametrize("layer", ["plain", "chunks", "all"])
def test_flex_attention_itself_computes_what_the_oracle_does(layer):
    for rows in (SHORT, DRAFTS):
        spec = CaseSpec(rows, q_heads=4, kv_heads=2, layer=LAYERS[layer])
        assert error_of(build_case(spec)) < TOLERANCE


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS.keys())
def test_flex_attention_itself_has_every_mask(make):
    spec = CaseSpec(DRAFTS, q_heads=4, kv_heads=2, layer=LAYERS["all"])
    assert error_of(build_visible(spec, make)) < TOLERANCE


def test_steps_of_any_size_take_the_kernels_of_the_first(monkeypatch):
    """One compilation for each height of tiles, whatever the rows, lengths, windows and pools."""
    compiled = []

    def compile_counted(graph, example_inputs):
        compiled.append(graph)
        return graph.forward

    kernels = {}

    def counted(shape):
        if shape not in kernels:
            kernels[shape] = FlexKernel(
                shape, lambda one: torch.compile(one, backend=compile_counted, fullgraph=True)
            )
        return kernels[shape]

    monkeypatch.setattr(flex, "unfused_kernel", counted)
    steps = [SHORT, rows_of((9, 1)), EXTEND, rows_of((0, 1), (30, 2)), rows_of((0, 140), (9, 1))]
    for number, rows in enumerate(steps):
        layer = list(LAYERS.values())[number % 4]  # nothing of them is in a kernel but cap and sink
        assert error_of(build_case(CaseSpec(rows, q_heads=4, layer=layer))) < TOLERANCE
        assert len(compiled) == len(TILE_ROWS)
    assert len(kernels) == len(TILE_ROWS)


def test_lengths_are_the_device_s():
    """Behind drafts the host knows upper bounds; windows begin where the true end says."""
    for layer in (LAYERS["plain"], LAYERS["window"]):
        case = finite(build_case(CaseSpec(rows_of((40, 3), (90, 1)), layer=layer)))
        wanted = case.run_oracle()
        batch = replace(case.batch, seq_lens_cpu=case.batch.seq_lens_cpu + 40)
        assert relative_error(run(case, backend_of(case), batch), wanted) < TOLERANCE


def test_a_page_may_stand_at_another_place_of_each_row():
    case = finite(build_case(CaseSpec((RowSpec(40, 2, 0), RowSpec(70, 2, 1)))))
    table, (first, second) = case.req_to_token_pool.req_to_token, case.batch.req_pool_indices
    table[second, 32:48] = table[first, :16]
    assert relative_error(case.run(FlexAttentionBackend), case.run_oracle()) < TOLERANCE


def test_a_step_forgets_where_pages_stood_in_the_last():
    cases = [finite(build_case(CaseSpec(EXTEND, layout_seed=seed))) for seed in range(2)]
    first, second = cases
    backend = backend_of(first)
    run(first, backend, first.batch)
    pools = (first.token_to_kv_pool, second.token_to_kv_pool)
    for to, of in zip(*(pool.get_kv_buffer(0) for pool in pools), strict=True):
        to.copy_(of)
    first.req_to_token_pool.req_to_token.copy_(second.req_to_token_pool.req_to_token)
    wanted = second.run_oracle()
    assert relative_error(run(second, backend, second.batch), wanted) < TOLERANCE


@pytest.mark.usefixtures("listed")
@pytest.mark.parametrize("layer", [LAYERS["window"], LAYERS["chunks"]], ids=["window", "chunks"])
@pytest.mark.parametrize("rows", STEPS.values(), ids=STEPS.keys())
def test_pages_that_were_given_back_are_in_no_output(rows, layer):
    case = build_case(replace(windowed(rows, layer, 16).spec, page_size=16))
    own = with_account(case)
    for buffer in own.token_to_kv_pool.get_kv_buffer(0):
        buffer.nan_to_num_(nan=1e4)
    assert relative_error(own.run(FlexAttentionBackend), case.run_oracle()) < 1e-2


@pytest.mark.usefixtures("listed")
def test_idle_and_padded_batches_give_no_nan():
    assert build_case(CaseSpec(())).run(FlexAttentionBackend).shape == (0, 8, 32)
    for layer in (LAYERS["plain"], LAYERS["sinks"]):
        case = finite(build_case(CaseSpec(rows_of((4, 1), (9, 3)), layer=layer)))
        lengths = case.batch.seq_lens_cpu.copy()
        lengths[0] = 0
        batch = replace(case.batch, seq_lens_cpu=lengths, seq_lens=torch.from_numpy(lengths))
        out = run(case, backend_of(case), batch)
        assert not out[0].any()
        assert relative_error(out[1:], case.run_oracle()[1:]) < TOLERANCE


def test_tiles_have_tokens_of_one_row_and_every_token_once():
    lengths = np.array([1, 40, 3, 16], dtype=np.int32)
    tiles = cut_step(7, lengths, CPU)
    assert tiles.shape.rows == TILE_ROWS[-1]
    of_token = torch.repeat_interleave(torch.from_numpy(lengths))
    owners = tiles.rows.unsqueeze(1).expand_as(tiles.tokens)
    assert torch.equal(owners[tiles.is_token], of_token[tiles.tokens[tiles.is_token]])
    assert torch.equal(tiles.tokens[tiles.is_token], torch.arange(60))
    assert torch.equal(tiles.tokens.flatten()[tiles.places], torch.arange(60))
    q = torch.randn(60, 14, 8)
    assert torch.equal(tiles.join(tiles.cut(q)), q)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"kv_dtype": torch.float16}, "model's dtype torch.float32, not torch.float16; triton_fp8"),
        ({"head_dim": 288}, r"16 to 256 elements, this model has \(288, 32\); torch_native"),
        ({"v_head_dim": 8}, r"16 to 256 elements, this model has \(32, 8\)"),
        ({"page_size": 24}, "multiple of 16 tokens, not 24; ask for another page_size"),
        ({"q_heads": 130, "kv_heads": 1}, "up to 128 query heads a KV head, this model has 130"),
    ],
)
def test_what_no_kernel_covers_is_refused_with_a_remedy(changes, why):
    case = build_case(replace(CaseSpec(rows_of((3, 1))), **changes))
    with pytest.raises(AttentionBackendError, match=why):
        backend_of(case)


def test_encoders_tokens_are_refused():
    case = build_case(CaseSpec(rows_of((3, 1))))
    config = replace(case.config, layers=(LayerAttentionConfig(max_encoder_tokens=4),))
    pool = ReqToTokenPool(3, 8, CPU, encoder_width=16)
    with pytest.raises(AttentionBackendError, match="no cross-attention; torch_native has"):
        FlexAttentionBackend(config, pool, case.token_to_kv_pool)


def test_a_step_that_was_not_planned_is_an_error():
    case = build_case(CaseSpec(rows_of((3, 1))))
    with pytest.raises(RuntimeError, match="init_forward_metadata"):
        backend_of(case).forward(case.q, case.k, case.v, case.layer, case.batch)


def test_it_stands_before_plain_torch_for_masks_that_only_these_two_have():
    pytest.importorskip("triton", reason="comes with torch for CUDA only")
    ampere = DeviceFacts("cuda", "A100", (8, 0))
    half = AttentionNeeds(torch.bfloat16, torch.bfloat16, needs_chunked_attention=True)
    needs = replace(half, chunk_size=100, visibilities=frozenset(VisibilityKind))
    assert select_attention_backend(None, ampere, needs).name == "flex"
    with pytest.raises(AttentionBackendError, match="'flex' was asked for but runs on cuda, not"):
        select_attention_backend("flex", DeviceFacts("cpu", "CPU", None), needs)
    with pytest.raises(AttentionBackendError, match="needs sm80 or newer, this is T4"):
        select_attention_backend("flex", DeviceFacts("cuda", "T4", (7, 5)), needs)
