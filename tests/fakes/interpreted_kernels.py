"""Kernels of mixtures of experts, latents and token masks by Triton's interpreter, against plain
torch.

To be run with TRITON_INTERPRET=1, which Triton reads when it is imported.
"""

import numpy as np
import torch
from torch.nn import functional

from workers.constraints.masks import StepMasks
from workers.layers.cuda.expert_gemm import ExpertTiles
from workers.layers.cuda.expert_maps import MappedTiles
from workers.layers.cuda.expert_routing import (
    ExpertPlaces,
    choose_by_softmax,
    counted,
    group,
)
from workers.layers.cuda.latent_projection import LatentProjection
from workers.layers.cuda.norm import _add_norm_kernel, rms_norm
from workers.layers.cuda.token_masks import greedy, rule_out, upload_masks
from workers.layers.gemm.fixed import FixedGemm
from workers.layers.moe.products import experts_in_torch
from workers.layers.moe.routing import SoftmaxRouting
from workers.layers.rope_frequencies import RopeSpec
from workers.layers.rotary import InterleavedRotaryEmbedding, RotaryEmbedding
from workers.layers.routed_experts import SILU, Gating, RoutedWeights, routed_in_torch
from workers.models.transformers_norms import rms_norm_in_torch
from workers.sampling.token_masks import find_masks
from workers.sampling.token_masks import rule_out as plain_rule_out

TOLERANCE = 1e-4


def tiles_of(block_rows):
    """By pointers and by maps, in both orders; groups of more and fewer blocks than there are."""
    yield ExpertTiles(block_rows, 16, 16, 2, 4)
    yield MappedTiles(block_rows, 16, 16, 2, 4, 3, True)
    yield MappedTiles(block_rows, 32, 16, 2, 4, 64, False)
    yield MappedTiles(block_rows, 16, 32, 2, 4, 64, False)


def plain_experts(x, gate_up, down, chosen):
    out = torch.zeros_like(x)
    for token, choice in torch.cartesian_prod(*map(torch.arange, chosen.ids.shape)).tolist():
        expert = chosen.ids[token, choice]
        gate, up = (gate_up[expert] @ x[token]).chunk(2)
        product = down[expert] @ (functional.silu(gate) * up)
        out[token] += chosen.weights[token, choice] * product
    return out


def check_blocks(chosen, grouped):
    """Every pair stands once, in a block of its own expert."""
    ids, seen = chosen.ids.flatten(), []
    num_blocks = int(grouped.num_blocks)
    assert num_blocks <= grouped.max_blocks
    for expert, first, num_rows in grouped.blocks[:, :num_blocks].t().tolist():
        assert 1 <= num_rows <= grouped.block_rows
        own = grouped.pairs[first : first + num_rows].tolist()
        assert set(ids[own].tolist()) == {expert}
        seen += own
    assert sorted(seen) == list(range(len(ids)))


def check_experts(num_tokens, num_routed, num_shared, num_chosen, hidden, width, block_rows):
    logits, x = torch.randn(num_tokens, num_routed), torch.randn(num_tokens, hidden)
    gate_up = torch.randn(num_routed + num_shared, 2 * width, hidden) * 0.2
    down = torch.randn(num_routed + num_shared, hidden, width) * 0.2
    for is_normed in (True, False):
        chosen = choose_by_softmax(logits, num_chosen, num_shared, 1.5, is_normed)
        weights, ids = SoftmaxRouting(num_chosen, is_normed, 1.5)(logits, None)
        assert torch.equal(chosen.ids[:, :num_chosen].long(), ids)
        assert torch.allclose(chosen.weights[:, :num_chosen], weights)
    again = counted(chosen.weights, chosen.ids, num_routed + num_shared)
    assert torch.equal(again.counts, chosen.counts)
    for one in (chosen, again):
        grouped = group(one, block_rows)
        check_blocks(one, grouped)
        wanted = plain_experts(x, gate_up, down, one)
        for tiles in tiles_of(block_rows):
            activated = tiles.activate(x, gate_up, grouped, num_chosen + num_shared)
            out = tiles.project(activated, down, one.weights, grouped).sum(0)
            assert torch.allclose(out, wanted, atol=TOLERANCE), tiles


def check_routed(num_tokens, num_experts, num_chosen, hidden, width, gating, has_bias):
    """Of a number of rows that takes the tiles of few."""
    x = torch.randn(num_tokens, hidden)
    ids = torch.stack([torch.randperm(num_experts)[:num_chosen] for _ in range(num_tokens)])
    shares = torch.rand(num_tokens, num_chosen)
    weights = RoutedWeights(
        torch.randn(num_experts, 2 * width, hidden) * 0.3,
        torch.randn(num_experts, hidden, width) * 0.3,
        gating,
        torch.randn(num_experts, 2 * width) if has_bias else None,
        torch.randn(num_experts, hidden) if has_bias else None,
    )
    grouped = group(counted(shares, ids.int(), num_experts), 16)
    wanted = routed_in_torch(x, ids, shares, weights)
    for tiles in tiles_of(16):
        activated = tiles.activate(
            x, weights.gate_up, grouped, num_chosen, weights.gate_up_bias, gating
        )
        parts = tiles.project(activated, weights.down, shares, grouped, weights.down_bias)
        assert torch.allclose(parts.sum(0), wanted, atol=TOLERANCE, rtol=1e-4), tiles


def check_rows_keep_to_themselves(hidden=40, width=24):
    """What is no number stays in its row, though blocks and tiles reach beyond theirs."""
    x, ids = torch.randn(5, hidden), torch.tensor([[0, 1], [1, 0], [0, 2], [2, 1], [1, 2]])
    x[1] = torch.nan
    gate_up, down = torch.randn(3, 2 * width, hidden), torch.randn(3, hidden, width)
    shares = torch.rand(ids.shape)
    grouped = group(counted(shares, ids.int(), 3), 16)
    for tiles in tiles_of(16):
        activated = tiles.activate(x, gate_up, grouped, 2)
        parts = tiles.project(activated, down, shares, grouped)
        assert torch.equal(parts.isnan().any(-1), (torch.arange(5) == 1).expand(2, 5)), tiles


def check_experts_of_other_ranks(num_tokens, num_here, num_chosen, hidden, width):
    """Ids beyond those here, of which several are one and the same, add nothing."""
    x, shares = torch.randn(num_tokens, hidden), torch.rand(num_tokens, num_chosen)
    ids = torch.randint(0, num_here + 3, (num_tokens, num_chosen)).clamp(max=num_here)
    weights = RoutedWeights(
        torch.randn(num_here, 2 * width, hidden) * 0.3,
        torch.randn(num_here, hidden, width) * 0.3,
        SILU,
    )
    chosen = counted(shares, ids.int(), num_here + 1)
    grouped = group(chosen, 16, num_elsewhere=1)
    blocks = grouped.blocks[:, : int(grouped.num_blocks)]
    assert set(blocks[0].tolist()) <= set(range(num_here))
    assert int(blocks[2].sum()) == int((ids < num_here).sum())
    wanted = experts_in_torch(x, ids, shares, weights)
    for tiles in tiles_of(16):
        activated = tiles.activate(x, weights.gate_up, grouped, num_chosen)
        parts = tiles.project(activated, weights.down, shares, grouped, leaves_out=True)
        assert torch.allclose(parts.sum(0), wanted, atol=TOLERANCE, rtol=1e-4), tiles


def check_choice_of_a_part(num_tokens, num_routed, num_shared, num_chosen):
    """Of the second half of the experts and the last piece: chosen as by all of them, counted and
    in blocks as far as they lie here."""
    logits, num_kept = torch.randn(num_tokens, num_routed), num_routed // 2 + 1
    places = torch.full((num_routed + num_shared,), num_kept)
    places[num_routed // 2 : num_routed] = torch.arange(num_routed // 2)
    places[-1] = num_kept - 1
    whole = choose_by_softmax(logits, num_chosen, num_shared, 1.5)
    chosen = choose_by_softmax(
        logits, num_chosen, num_shared, 1.5, here=ExpertPlaces(places, num_kept)
    )
    assert torch.equal(chosen.weights, whole.weights)
    assert torch.equal(chosen.ids.long(), places[whole.ids.long()])
    is_here = chosen.ids.flatten() < num_kept
    counts = torch.bincount(chosen.ids.flatten()[is_here], minlength=num_kept + 1)
    assert torch.equal(chosen.counts.long(), counts)
    assert chosen.ranks.min() >= 0
    grouped = group(chosen, 16, num_elsewhere=1)
    seen = []
    for expert, first, num_rows in grouped.blocks[:, : int(grouped.num_blocks)].t().tolist():
        own = grouped.pairs[first : first + num_rows].long()
        assert set(chosen.ids.flatten()[own].tolist()) == {expert}
        seen += own.tolist()
    assert sorted(seen) == is_here.nonzero().flatten().tolist()


def check_latents(rotary_class, num_tokens=5, heads=3, nope=24, latent=40, rope=16, positions=64):
    spec = RopeSpec("default", 10000.0, rope, positions, {})
    rotary = rotary_class(spec, positions, torch.device("cpu"))
    pool, norm = torch.zeros(100, latent + rope), torch.randn(latent)
    joined = torch.randn(2, num_tokens, heads * (nope + rope) + latent + rope)
    queries, keys = joined.tensor_split((heads * (nope + rope),), dim=-1)
    at, places = torch.randint(0, positions, (num_tokens,)), torch.randperm(100)[:num_tokens]
    project = LatentProjection(
        heads, nope, norm, 1e-6, rotary.cos_sin, rotary_class is InterleavedRotaryEmbedding, pool
    )
    q_out, kept_out = project(queries, keys, at, places)
    q, k = queries.sum(0).view(num_tokens, heads, -1), keys.sum(0)
    q_rope, k_rope = rotary(at, q[..., nope:], k[:, None, latent:])
    compressed = k[:, :latent]
    rms = torch.rsqrt(compressed.square().mean(-1, keepdim=True) + 1e-6)
    kept = torch.cat((compressed * rms * norm, k_rope[:, 0]), dim=-1)
    pairs = [
        (q_out[..., :nope], q[..., :nope]),
        (q_out[..., nope:], q_rope),
        (kept_out, kept),
        (pool[places], kept),
    ]
    assert all(torch.allclose(ours, theirs, atol=TOLERANCE) for ours, theirs in pairs)


def check_parts_beyond_32_bits(num_tokens=2, hidden=16, num_splits=3, stride=1_100_000_000):
    """Memory that nobody touches is only promised: of these gigabytes some pages are there."""
    parts = torch.empty((num_splits - 1) * stride + num_tokens * hidden, dtype=torch.int8)
    for split in range(num_splits):
        parts[split * stride :][: num_tokens * hidden] = split + 1
    residual, weight = torch.zeros(num_tokens, hidden), torch.ones(hidden)
    _add_norm_kernel[(num_tokens,)](
        parts,
        residual,
        weight,
        torch.empty_like(residual),
        stride,
        hidden,
        1e-6,
        NUM_SPLITS=num_splits,
        IS_WIDE=True,
        BLOCK=hidden,
        IS_DEPENDENT=False,
    )
    assert (residual == 6.0).all()


def check_norm(num_tokens, hidden, scale_dtype):
    """As transformers' own norms run: the scale in float32 and the rows in 16 bits. Not bfloat16,
    which Triton's interpreter cuts off where a GPU rounds."""
    x = (torch.randn(num_tokens, hidden) + 0.5).to(torch.float16)
    scale = 1.0 + torch.randn(hidden).to(scale_dtype) * 0.1
    normed = rms_norm(x, scale, 1e-6)
    wanted = rms_norm_in_torch(x, scale, 1e-6)
    assert normed.dtype is x.dtype
    assert torch.allclose(normed.float(), wanted.float(), rtol=2**-10, atol=1e-6)


def check_masks(num_rows, vocab_size, dtype):
    slots, positions = np.arange(num_rows, dtype=np.int32), np.full(num_rows, 9, dtype=np.int32)
    masked = np.arange(0, num_rows, 2, dtype=np.int32)
    words = np.random.default_rng(3).integers(-(2**31), 2**31, (len(masked), -(-vocab_size // 32)))
    masks = StepMasks(0, masked, positions[masked], words.astype(np.int32).reshape(-1))
    # Columns beyond the vocabulary, as a padded head has them, and two equal likeliest tokens.
    logits = torch.randn(num_rows, vocab_size + 24).to(dtype)[:, :vocab_size]
    logits[:, [3, vocab_size - 1]] = 9.0
    found = find_masks(slots, positions, masked, masks)
    on_device = upload_masks(num_rows, found, masks, torch.device("cpu"))
    allowed = plain_rule_out(logits, found, masks)
    assert torch.equal(rule_out(logits, on_device), allowed)
    first = [int((row == row.max()).nonzero()[0]) for row in allowed]
    logits[1, 7] = torch.nan
    token_ids, has_nan = greedy(logits, on_device)
    assert has_nan.tolist() == [row == 1 for row in range(num_rows)]
    assert token_ids.tolist() == [first[0], 0, *first[2:]]
    nothing = find_masks(slots + 100, positions, masked, masks)
    assert upload_masks(num_rows, nothing, masks, torch.device("cpu")) is None


def check_fixed(num_tokens, out_features, in_features, num_splits):
    """The product, in parts; and that of some rows alone."""
    x = torch.randn(num_tokens, in_features).to(torch.float16)
    weight = torch.randn(out_features, in_features).to(torch.float16)
    gemm = FixedGemm(num_splits)
    parts = gemm(x, weight)
    wanted = x.float() @ weight.float().t()
    assert parts.shape == (num_splits, num_tokens, out_features)
    assert torch.allclose(parts.float().sum(0), wanted, rtol=1e-2, atol=1e-1)
    for rows in (x[:1], x[-2:]):
        assert torch.equal(gemm(rows, weight), parts[:, :1] if len(rows) == 1 else parts[:, -2:])


if __name__ == "__main__":
    torch.manual_seed(0)
    check_experts(1, 8, 2, 3, 40, 24, 16)
    check_experts(23, 8, 2, 3, 48, 24, 16)
    check_experts(9, 6, 0, 2, 32, 16, 32)
    check_experts_of_other_ranks(21, 3, 4, 40, 24)
    check_choice_of_a_part(37, 8, 2, 3)
    check_choice_of_a_part(1, 8, 2, 1)
    check_choice_of_a_part(70, 64, 1, 6)
    check_routed(5, 6, 2, 40, 24, SILU, has_bias=False)
    check_routed(19, 4, 3, 24, 40, Gating(1.702, 1.5), has_bias=True)
    check_rows_keep_to_themselves()
    check_latents(RotaryEmbedding)
    check_latents(InterleavedRotaryEmbedding)
    check_parts_beyond_32_bits()
    check_norm(5, 24, torch.float32)
    check_norm(1, 64, torch.float16)
    check_fixed(70, 131, 72, 1)
    check_fixed(5, 40, 256, 2)
    check_masks(5, 100, torch.float32)
    check_masks(4, 5000, torch.bfloat16)
    print("all equal")
