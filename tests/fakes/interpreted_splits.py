"""Experts' products whose turns programs share out, by Triton's interpreter, which runs one program
after the other: here in several orders, so that any split of a tile may come last.

To be run with TRITON_INTERPRET=1, which Triton reads when it is imported.
"""

from contextlib import contextmanager

import torch
from triton.runtime import interpreter

from tests.fakes.interpreted_quantised import check_close, fp4_stack, fp8_stack
from workers.layers.cuda.expert_routing import counted, group
from workers.layers.kept.experts import KeptExperts
from workers.layers.quantised.expert_products import InSplits
from workers.layers.quantised.expert_splits import SplitShape, SplitTiles
from workers.layers.routed_experts import SILU, Gating, RoutedWeights, routed_in_torch

NUM_EXPERTS = 4


def as_they_are(index, grid):
    return index


def backwards(index, grid):
    return tuple(size - 1 - place for place, size in zip(index, grid, strict=True))


def shuffled(index, grid):
    """Neighbours in the order of time are of different tiles, and a tile's splits in any order."""
    x, y, _ = index
    random = torch.Generator().manual_seed(grid[0])
    place = int(torch.randperm(grid[0] * grid[1], generator=random)[x * grid[1] + y])
    return place // grid[1], place % grid[1], 0


@contextmanager
def programs_come(order):
    builder = interpreter.interpreter_builder
    set_in_turn = builder.set_grid_idx
    builder.set_grid_idx = lambda *index: set_in_turn(*order(index, builder.grid_dim))
    try:
        yield
    finally:
        builder.set_grid_idx = set_in_turn


def experts_of(stack, hidden_size, width, gating, has_bias):
    gate_up = stack(NUM_EXPERTS, 2 * width, hidden_size)
    down = stack(NUM_EXPERTS, hidden_size, width)
    biases = (None, None)
    if has_bias:
        biases = tuple(torch.randn(NUM_EXPERTS, n) for n in (2 * width, hidden_size))
    kept = KeptExperts(gate_up, down, gating, *biases)
    return kept, RoutedWeights(gate_up.dequantised(), down.dequantised(), gating, *biases)


def check_splits(experts, num_tokens, columns, splits, others=(backwards, shuffled)):
    """Every order of programs gives the same bits: those of the splits' order."""
    kept, plain = experts
    x, weights = torch.randn(num_tokens, plain.gate_up.shape[2]), torch.rand(num_tokens, 2)
    ids = torch.stack([torch.randperm(NUM_EXPERTS)[:2] for _ in range(num_tokens)]).int()
    chosen = counted(weights, ids, NUM_EXPERTS)
    shapes = (SplitShape(columns, num_splits, 1, 4) for num_splits in splits)
    way = InSplits(SplitTiles(16, *shapes))
    found = []
    for order in (as_they_are, *others):
        with programs_come(order):
            found.append(way.products(x, chosen, kept, 1))
    num_parts = 2 * min(splits[1], kept.down.num_turns)
    assert found[0].shape == (num_parts, num_tokens, x.shape[1])
    assert all(torch.equal(one, found[0]) for one in found)
    check_close(found[0].sum(0), routed_in_torch(x, ids, weights, plain), 1e-5)


def check_experts_elsewhere(experts):
    """Whose parts are zeros, all of a choice's."""
    kept, plain = experts
    x, weights = torch.randn(5, plain.gate_up.shape[2]), torch.rand(5, 2)
    ids = torch.tensor([[0, 4], [4, 0], [4, 4], [0, 1], [3, 4]], dtype=torch.int32)
    chosen = counted(weights, ids, NUM_EXPERTS + 1)
    shape = SplitShape(64, 1, 1, 4)
    parts = InSplits(SplitTiles(16, shape, shape)).products(x, chosen, kept, 2)
    is_here = ids < NUM_EXPERTS
    wanted = routed_in_torch(x, ids.clamp(max=NUM_EXPERTS - 1), weights * is_here, plain)
    check_close(parts.sum(0), wanted, 1e-5)
    by_choice = parts.unflatten(0, (-1, 2)).transpose(1, 2)
    assert not by_choice[:, ~is_here].any()
    assert by_choice[:, is_here].any(-1).all()


def check_counters():
    """Zeros, more of them than are written at a time, and none where nobody counts."""
    ids = torch.arange(40, dtype=torch.int32).remainder(NUM_EXPERTS).view(20, 2)
    chosen = counted(torch.rand(20, 2), ids, NUM_EXPERTS)
    grouped = group(chosen, 16, counters_a_block=300)
    assert torch.equal(grouped.counters, torch.zeros(grouped.max_blocks * 300, dtype=torch.int32))
    assert int(grouped.num_blocks) == NUM_EXPERTS
    assert len(group(chosen, 16).counters) == 0


if __name__ == "__main__":
    torch.manual_seed(0)
    # What is read before it is written is no number then, and counts from the largest integer.
    torch.use_deterministic_algorithms(True)
    fp4 = experts_of(fp4_stack, 288, 160, Gating(1.702, 7.0), has_bias=True)
    fp8 = experts_of(fp8_stack, 256, 256, SILU, has_bias=False)
    check_splits(fp4, 2, 64, (3, 1))
    check_splits(fp8, 2, 64, (2, 8))
    # Several blocks of one expert.
    check_splits(fp4, 34, 128, (2, 2), others=(shuffled,))
    check_experts_elsewhere(fp4)
    check_counters()
    print("all equal")
