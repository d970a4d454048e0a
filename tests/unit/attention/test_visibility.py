"""What new tokens see: torch_native against the oracle for each kind, and who refuses which."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from attention import LayerAttentionConfig
from attention.backends.torch_native import TorchNativeBackend
from attention.capability import AttentionBackendError
from attention.oracle import OracleBackend
from attention.preferences import DeviceFacts
from attention.selection import AttentionNeeds, select_attention_backend
from attention.visibility import CAUSAL, Everything, Items, Tree, VisibilityKind
from tests.gpu.attention.vectorised_oracle import VectorisedOracleBackend
from tests.proofs.cells import proves
from tests.unit.attention.cases import CaseSpec, RowSpec, build_case, relative_error, rows_of
from tests.unit.attention.latent_cases import build_latent_case
from tests.unit.attention.visibility_cases import KINDS, build_visible, fields_of

CPU = torch.device("cpu")
TOLERANCE = 1e-5
EXACT = 1e-12

ROWS = rows_of((7, 5), (0, 9), (20, 1), (0, 1), (3, 0), (40, 17))
LONG = rows_of((30, 150), (0, 140), (5, 1))
LAYERS = {
    "plain": LayerAttentionConfig(),
    "window": LayerAttentionConfig(sliding_window_size=6),
    "window_of_one": LayerAttentionConfig(sliding_window_size=1),
    "chunks": LayerAttentionConfig(chunk_size=8),
    "all": LayerAttentionConfig(sliding_window_size=11, logit_cap=1.5, has_sinks=True),
}


def error_of(spec, make, backend=TorchNativeBackend):
    case = build_visible(spec, make)
    return relative_error(case.run(backend), case.run_oracle())


@proves("torch_native")
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS.keys())
@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS.keys())
def test_every_kind_of_layer_agrees_with_the_oracle(make, layer):
    assert error_of(CaseSpec(ROWS, head_dim=8, layer=layer), make) < TOLERANCE


@proves("torch_native")
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("kv_heads", [1, 8])
@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS.keys())
def test_every_gqa_ratio_and_page_size_agrees_with_the_oracle(make, kv_heads, page_size):
    spec = CaseSpec(ROWS, page_size=page_size, kv_heads=kv_heads, head_dim=8, v_head_dim=8)
    assert error_of(spec, make) < TOLERANCE


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS.keys())
def test_rows_of_several_blocks_agree_with_the_oracle(make):
    spec = CaseSpec(LONG, q_heads=2, kv_heads=1, head_dim=8, v_head_dim=8, layer=LAYERS["window"])
    assert error_of(spec, make) < TOLERANCE
    assert error_of(spec, make, VectorisedOracleBackend) < EXACT


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS.keys())
def test_idle_and_padded_batches_give_no_nan(make):
    assert build_visible(CaseSpec(()), make).run(TorchNativeBackend).shape == (0, 8, 32)
    case = build_visible(CaseSpec(rows_of((4, 1), (9, 3))), make)
    lengths = case.batch.seq_lens_cpu.copy()
    lengths[0] = 0
    padded = replace(case.batch, seq_lens_cpu=lengths, seq_lens=torch.from_numpy(lengths))
    out = replace(case, batch=padded).run(TorchNativeBackend)
    assert not out[0].any()
    assert relative_error(out[1:], case.run_oracle()[1:]) < TOLERANCE


def test_a_chain_of_drafts_and_items_of_no_prefix_are_causal():
    spec = CaseSpec(rows_of((7, 5), (0, 3)))
    chain = Tree.of_parents([np.arange(-1, n - 1, dtype=np.int32) for n in (5, 3)], CPU)
    one_item = Items.of_starts([[], []], np.array([7, 0]), np.array([5, 3]), CPU)
    case = build_case(spec)
    for visibility in (chain, one_item):
        batch = replace(case.batch, visibility=visibility)
        assert relative_error(replace(case, batch=batch).run_oracle(), case.run_oracle()) < EXACT


def test_a_path_of_a_tree_sees_what_its_tokens_see_as_a_row_of_their_own():
    """What verification needs: an accepted path's outputs are those of the sequence it spells."""
    whole = build_case(CaseSpec((RowSpec(6, 5, 3),)))
    parents = np.array([-1, 0, 0, 2, 1], dtype=np.int32)
    path = [0, 2, 3]
    batch = replace(whole.batch, visibility=Tree.of_parents([parents], CPU))
    out = replace(whole, batch=batch).run_oracle()
    alone = build_case(CaseSpec((RowSpec(6, 3, 3),)))
    # A row's contents are drawn for its whole length: the prefix comes from the longer one.
    slot = alone.batch.req_pool_indices[0]
    places = alone.req_to_token_pool.req_to_token[slot, :6].long()
    source = whole.req_to_token_pool.req_to_token[whole.batch.req_pool_indices[0], :6].long()
    pools = zip(
        alone.token_to_kv_pool.get_kv_buffer(0),
        whole.token_to_kv_pool.get_kv_buffer(0),
        strict=True,
    )
    for to, of in pools:
        to.flatten(0, 1)[places] = of.flatten(0, 1)[source]
    spelled = replace(alone, q=whole.q[path], k=whole.k[path], v=whole.v[path])
    assert relative_error(out[path], spelled.run_oracle()) < EXACT


@pytest.mark.parametrize("backend", [OracleBackend, TorchNativeBackend])
def test_items_give_what_each_gives_alone_behind_the_prefix(backend):
    """And do not depend on where a row is cut into chunks."""
    prefix, lengths = 6, (3, 1, 4)
    starts = [6, 9, 10]
    length = prefix + sum(lengths)
    layer = LayerAttentionConfig(sliding_window_size=5)
    full = build_case(CaseSpec((RowSpec(0, length, 3),), layer=layer))
    places = np.concatenate([np.arange(6), *(6 + np.arange(n) for n in lengths)])
    for cut in (0, 7, 11):
        spec = CaseSpec((RowSpec(cut, length - cut, 3),), layer=layer)
        visibility = Items.of_starts([starts], np.array([cut]), np.array([length - cut]), CPU)
        case = build_case(spec)
        batch = replace(case.batch, **fields_of(spec, visibility, [places[cut:]]))
        out = replace(case, batch=batch).run(backend)
        for start, num in zip(starts, lengths, strict=True):
            own = [*range(prefix), *range(start, start + num)]
            alone = build_case(CaseSpec((RowSpec(0, prefix + num, 3),), layer=layer))
            alone = replace(alone, q=full.q[own], k=full.k[own], v=full.v[own])
            wanted = alone.run_oracle()[prefix:]
            first = max(start - cut, 0)
            got = out[first : max(start + num - cut, 0)]
            if len(got):
                assert relative_error(got, wanted[num - len(got) :]) < TOLERANCE


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS.keys())
def test_latents_are_seen_as_heads_are(make):
    """Against masks in float64 over K and V of every head; 600 keys are two pieces of latents."""
    for rows in (ROWS[:4], rows_of((560, 40), (600, 1), (500, 150))):
        case = build_latent_case(CaseSpec(rows))
        visibility, positions = make(case.spec, np.random.default_rng(1))
        fields = fields_of(case.spec, visibility, positions)
        case = replace(case, batch=replace(case.batch, **fields))
        assert relative_error(case.run(), case.run_oracle()) < TOLERANCE


def test_backends_without_a_kind_refuse_it_by_name():
    case = build_case(CaseSpec(rows_of((4, 2))))
    backend = TorchNativeBackend(case.config, case.req_to_token_pool, case.token_to_kv_pool)
    backend.capability = replace(
        backend.capability, name="plain", visibilities=frozenset({CAUSAL.kind})
    )
    backend.check_visibility(case.batch)
    with pytest.raises(AttentionBackendError, match="plain has no visibility of later tokens"):
        backend.check_visibility(replace(case.batch, visibility=Everything()))


@pytest.mark.parametrize(
    "kind", [kind for kind in VisibilityKind if kind is not VisibilityKind.CAUSAL]
)
def test_what_a_model_s_steps_see_is_a_need_like_any_other(kind):
    hopper = DeviceFacts("cuda", "H200", (9, 0))
    needs = AttentionNeeds(
        torch.bfloat16, torch.bfloat16, visibilities=frozenset({VisibilityKind.CAUSAL, kind})
    )
    with pytest.raises(AttentionBackendError, match="'fa3' was asked for but has no"):
        select_attention_backend("fa3", hopper, needs)
    assert select_attention_backend("torch_native", hopper, needs).name == "torch_native"


@pytest.mark.parametrize(
    ("parents", "why"), [([[-1, 1]], "not before it"), ([[-1, 0], [-2]], "is -2")]
)
def test_parents_come_before_their_children(parents, why):
    with pytest.raises(ValueError, match=why):
        Tree.of_parents([np.array(row, dtype=np.int32) for row in parents], CPU)


def test_masks_and_items_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="true on its diagonal"):
        Tree.of_masks([np.zeros((2, 2), dtype=np.bool_)], CPU)
    with pytest.raises(ValueError, match="square"):
        Tree.of_masks([np.ones((2, 3), dtype=np.bool_)], CPU)
    with pytest.raises(ValueError, match="one behind the other"):
        Items.of_starts([[4, 4]], np.array([0]), np.array([9]), CPU)
