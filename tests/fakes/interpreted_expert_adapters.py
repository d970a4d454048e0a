"""Adapters on chosen experts by Triton's interpreter, against plain torch, expert by expert.

To be run with TRITON_INTERPRET=1, which Triton reads when it is imported. What the interpreter
proves is what is computed: not the order of launches on a GPU, on which these kernels have not run.
"""

import math
from dataclasses import dataclass
from types import SimpleNamespace

import torch

from workers.layers.cuda import expert_adapters
from workers.layers.cuda.expert_adapters import (
    ExpertAdapterMatrices,
    ExpertAdapterTiles,
    adapted_partial_products,
)
from workers.layers.cuda.expert_gemm import ExpertTiles
from workers.layers.cuda.expert_routing import counted, group, pairs_here
from workers.layers.gemm.device_limits import HOPPER
from workers.layers.routed_experts import SILU, Gating, RoutedWeights, gated

GPT_OSS = Gating(1.702, 1.5)
BY_POINTERS = expert_adapters.BY_POINTERS
new_tensor = torch.empty


def new_poisoned(*size, **options):
    """torch.empty whose numbers nobody may read before they are written."""
    new = new_tensor(*size, **options)
    return new.fill_(torch.nan) if new.is_floating_point() else new


class SmallTiles(ExpertAdapterTiles):
    """Several blocks of ranks, inputs and outputs, and splits, in tiny sizes."""

    num = 3

    @classmethod
    def of(cls, block_rows):
        return ExpertAdapterTiles(16, 16, 16, cls.num, num_warps=4, min_turns=1)


def use_tiles(block_rows, num_splits):
    """block_rows: None for the engine's own of both kinds."""
    if block_rows is None:
        expert_adapters.BY_POINTERS = BY_POINTERS
        expert_adapters.ExpertAdapterTiles = ExpertAdapterTiles
        return
    tiles = ExpertTiles(block_rows, 16, 16, 2, 4)
    expert_adapters.BY_POINTERS = ((math.inf, (tiles, tiles)),)
    expert_adapters.ExpertAdapterTiles = SmallTiles
    SmallTiles.num = num_splits


@dataclass
class Case:
    """tokens: the slot of each. ranks: of each slot from 1 on, for gate, up and down.
    num_elsewhere: experts that another of two ranks has. rank_block: beyond whole ones of a slot's
    ranks nothing is read."""

    tokens: list
    ranks: list
    max_rank: int
    num_here: int = 3
    num_elsewhere: int = 0
    num_chosen: int = 2
    hidden: int = 37
    width: int = 21
    gating: Gating = SILU
    has_bias: bool = False
    dtype: torch.dtype = torch.float32
    rank_block: int = 16

    def experts(self):
        def random(*size, scale):
            return (torch.randn(self.num_here, *size) * scale).to(self.dtype)

        return RoutedWeights(
            random(2 * self.width, self.hidden, scale=self.hidden**-0.5),
            random(self.hidden, self.width, scale=self.width**-0.5),
            self.gating,
            random(2 * self.width, scale=1.0) if self.has_bias else None,
            random(self.hidden, scale=1.0) if self.has_bias else None,
        )

    def pair(self, part, num_inputs, num_outputs):
        """A and B of all slots and experts, of unlike ranks up to the slot's: of slot 0, and beyond
        the blocks that are read, no numbers."""
        size = len(self.ranks) + 1, self.num_here
        a = torch.randn(*size, self.max_rank, num_inputs) * num_inputs**-0.5
        b = torch.randn(*size, num_outputs, self.max_rank)
        a[0] = b[0] = torch.nan
        for slot, ranks in enumerate(self.ranks, start=1):
            rank = ranks[part]
            for expert in range(self.num_here):
                own = max(0, rank - expert % 2)
                a[slot, expert, own:] = 0
                b[slot, expert, :, own:] = 0
            unread = -(-rank // self.rank_block) * self.rank_block
            a[slot, :, unread:] = torch.nan
            b[slot, :, :, unread:] = torch.nan
        return a.to(self.dtype), b.to(self.dtype)

    def matrices(self):
        gate, up = (self.pair(part, self.hidden, self.width) for part in (0, 1))
        down = self.pair(2, self.width, self.hidden)
        gate_up = [torch.cat(both, dim=2).contiguous() for both in zip(gate, up, strict=True)]
        ranks = torch.tensor([[0, 0, 0], *self.ranks], dtype=torch.int32)
        return ExpertAdapterMatrices(*gate_up, *down, ranks)

    def choice(self):
        """ids below num_here, or num_here itself for all that are elsewhere, and shares."""
        num_experts = self.num_here + self.num_elsewhere
        rows = [torch.randperm(num_experts)[: self.num_chosen] for _ in self.tokens]
        ids = torch.stack(rows).clamp(max=self.num_here)
        return ids, torch.rand(ids.shape) + 0.5


def delta(a, b, rank, x):
    return b[:, :rank].float() @ (a[:rank].float() @ x)


def plain_pair(x, expert, slot, experts, matrices):
    """What one expert makes of one token in float32, before the weight."""
    max_rank, width = matrices.max_rank, experts.down.shape[2]
    parts = experts.gate_up[expert].float() @ x.float()
    if experts.gate_up_bias is not None:
        parts += experts.gate_up_bias[expert].float()
    gate_rank, up_rank, down_rank = matrices.ranks[slot].tolist()
    a, b = matrices.gate_up_a[slot, expert], matrices.gate_up_b[slot, expert]
    parts[:width] += delta(a[:max_rank], b[:width], gate_rank, x.float())
    parts[width:] += delta(a[max_rank:], b[width:], up_rank, x.float())
    inner = gated(parts, experts.gating)
    out = experts.down[expert].float() @ inner
    if experts.down_bias is not None:
        out += experts.down_bias[expert].float()
    return out + delta(
        matrices.down_a[slot, expert], matrices.down_b[slot, expert], down_rank, inner
    )


def plain(x, ids, shares, experts, matrices, slots):
    """(k, n, hidden): zeros for pairs of experts that are not here."""
    out = torch.zeros(ids.shape[1], *x.shape)
    for token, choice in torch.cartesian_prod(*map(torch.arange, ids.shape)).tolist():
        expert = int(ids[token, choice])
        if expert < experts.down.shape[0]:
            pair = plain_pair(x[token], expert, int(slots[token]), experts, matrices)
            out[choice, token] = shares[token, choice] * pair
    return out


def without_adapters(x, chosen, experts, num_parts):
    """By the same tiles."""
    activate, project = expert_adapters._tiles(pairs_here(chosen, num_parts), experts)
    grouped = group(chosen, activate.block_rows, int(num_parts > 1))
    num_chosen, bias = chosen.ids.shape[1], experts.gate_up_bias
    activated = activate.activate(x, experts.gate_up, grouped, num_chosen, bias, experts.gating)
    weights, bias = chosen.weights, experts.down_bias
    return project.project(activated, experts.down, weights, grouped, bias, num_parts > 1)


def check(case, block_rows=16, num_splits=3, tolerance=1e-4):
    use_tiles(block_rows, num_splits)
    experts, matrices, (ids, shares) = case.experts(), case.matrices(), case.choice()
    num_parts = 2 if case.num_elsewhere else 1
    x = torch.randn(len(case.tokens), case.hidden).to(case.dtype)
    slots = torch.tensor(case.tokens, dtype=torch.int32)
    chosen = counted(shares, ids.int(), case.num_here + num_parts - 1)
    out = adapted_partial_products(x, chosen, experts, matrices, slots, num_parts)
    wanted = plain(x, ids, shares, experts, matrices, slots)
    assert out.shape == wanted.shape
    assert out.dtype is case.dtype
    torch.testing.assert_close(out.float(), wanted, atol=tolerance, rtol=tolerance)
    elsewhere = (ids == case.num_here).T
    assert elsewhere.any() == (num_parts > 1)
    assert not out[elsewhere].any()
    bare = without_adapters(x, chosen, experts, num_parts)
    integers = torch.int32 if case.dtype is torch.float32 else torch.int16
    is_bare = slots == 0
    assert torch.equal(out[:, is_bare].view(integers), bare[:, is_bare].view(integers))
    changed = (out != bare).any(-1)
    has_any = (matrices.ranks[slots.long()] > 1).any(-1)
    assert torch.equal(changed[:, has_any], ~elsewhere[:, has_any])


def check_rows_keep_to_themselves():
    """What is no number in a token or in an adapter stays in the rows that have it."""
    use_tiles(16, 2)
    case = Case([1, 2, 0, 1, 2, 3, 0], [(3, 3, 3), (3, 3, 3), (3, 3, 3)], 5, num_here=2)
    experts, matrices, (ids, shares) = case.experts(), case.matrices(), case.choice()
    slots = torch.tensor(case.tokens, dtype=torch.int32)
    for one in (matrices.gate_up_a, matrices.gate_up_b, matrices.down_a, matrices.down_b):
        one[2] = torch.nan
    x = torch.randn(len(slots), case.hidden)
    x[3] = x[6] = torch.nan
    chosen = counted(shares, ids.int(), case.num_here)
    out = adapted_partial_products(x, chosen, experts, matrices, slots)
    is_none = (slots == 2) | x.isnan().any(-1)
    assert torch.equal(out.isnan().any(-1), is_none.expand(case.num_chosen, -1))


MANY = [1, 2, 0, 3, 1, 0, 2, 2, 3, 1, 1]
# The second leaves up as it is, the third all but down, the fourth everything.
RANKS = [(3, 3, 3), (2, 0, 3), (0, 0, 2), (0, 0, 0)]
CASES = (
    # (case, block_rows, num_splits)
    (Case(MANY, [(1, 1, 1)] * 3, 1), 16, 3),
    (Case(MANY, RANKS, 3), 16, 1),
    (Case([4, *MANY, 4], RANKS, 3, num_chosen=1), 32, 2),
    (Case(MANY, [(16, 16, 16), (3, 16, 1), (0, 2, 16)], 16, num_chosen=3), 16, 3),
    (Case(MANY, [(16, 5, 16), (40, 33, 17), (1, 0, 40)], 40), 64, 2),
    (Case(MANY, RANKS, 3, 4, num_elsewhere=3, num_chosen=3), 16, 2),
    (Case(MANY * 2, RANKS, 3, gating=GPT_OSS, has_bias=True, hidden=48, width=32), 16, 2),
    (Case(MANY * 4, RANKS, 3, num_here=2, hidden=16, width=16), 32, 1),
    (Case([0] * 5, RANKS, 3), 16, 1),
    (Case([2], RANKS, 3), 128, 1),
    # The engine's own tiles, of few rows and of many.
    (Case(MANY, [(3, 40, 3), (0, 2, 40), (40, 33, 0)], 40, rank_block=32), None, None),
    (Case([1] * 150 + [2] * 20 + MANY, RANKS, 3, 1, num_chosen=1, hidden=16, width=8), None, None),
)

if __name__ == "__main__":
    torch.manual_seed(0)
    torch.empty = new_poisoned
    expert_adapters.DeviceLimits = SimpleNamespace(of=lambda device: HOPPER)
    for case, block_rows, num_splits in CASES:
        check(case, block_rows, num_splits)
    halves = Case(MANY, RANKS, 3, gating=GPT_OSS, has_bias=True, dtype=torch.float16)
    check(halves, tolerance=3e-2)
    check_rows_keep_to_themselves()
    torch.empty = new_tensor
    print("all equal")
