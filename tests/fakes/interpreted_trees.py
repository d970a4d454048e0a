"""Kernels of trees of drafts, against plain torch on the default device.

To be run with TRITON_INTERPRET=1, which Triton reads when it is imported; a GPU's tests call the
checks, too.
"""

from dataclasses import fields
from unittest import mock

import numpy as np
import torch

from attention.kernels.triton_kv_lines import line_up
from tests.fakes.interpreted_threads import run_one_kernel_at_a_time
from workers.layers.cuda.tree_levels import grow_level
from workers.layers.cuda.tree_paths import find_before, hold_paths, mark_ancestors
from workers.layers.cuda.tree_states import carry_states
from workers.scheduler.plan import StepPlan
from workers.speculation import step_trees, tree_kernels
from workers.speculation.device_tree import DeviceTrees
from workers.speculation.runs import ranges
from workers.speculation.step_trees import StepTrees, sees_ancestors

SHAPES = [(4, 4, 2), (8, 3, 1), (1, 1, 1), (1, 12)]


def stable_topk(values, k):
    """torch's, whose choice among equals is any, with the first of them."""
    found = torch.sort(values, dim=1, descending=True, stable=True)
    return found[0][:, :k].contiguous(), found[1][:, :k].contiguous()


def check_equal(grown, wanted):
    for field in fields(DeviceTrees):
        own, other = getattr(grown, field.name), getattr(wanted, field.name)
        if field.name == "logprobs":
            assert torch.allclose(own, other, atol=1e-5, equal_nan=True), (own, other)
        elif field.name == "num_newest":
            assert own == other
        else:
            assert torch.equal(own, other), field.name


def check_growth(widths, vocab, dtype, round_to=0.0, has_names=False, spoilt=(), own_widths=None):
    """round_to: of logits, so that many are equal. spoilt: rows of logits that are no number."""
    n = 3
    names = torch.randperm(vocab) if has_names else None
    trees = wanted = DeviceTrees.of_roots(torch.randint(0, 50, (n,)))
    for level, width in enumerate(widths):
        logits = 3 * torch.randn(n * trees.num_newest, vocab)
        logits[spoilt, :] = torch.nan
        if round_to:
            logits = (logits / round_to).round() * round_to
        logits = logits.to(dtype)
        own = None if own_widths is None or not level else own_widths[:, level - 1]
        trees = grow_level(trees, logits, width, names, own)
        with mock.patch.object(torch.Tensor, "topk", stable_topk):
            wanted = wanted.grown(logits, width, names, own)
        if not spoilt:
            check_equal(trees, wanted)
        else:
            # Of equals without number the plain one takes any.
            assert torch.equal(trees.parents, wanted.parents)
            assert torch.equal(trees.sees, wanted.sees)
            of_parents = trees.parents * vocab + trees.ids
            assert all(len(set(row)) == len(row) for row in of_parents[:, 1:].tolist())


def check_states(num_tokens, size, dtype):
    carried, made = torch.randn(3, size).to(dtype), torch.randn(3, num_tokens - 2, size).to(dtype)
    parents = torch.randint(0, num_tokens - 2, (3, num_tokens))
    parents[:, 0] = 0
    found = carry_states(carried, made, parents)
    assert torch.equal(found, tree_kernels.carry_states(carried, made, parents))


def on_device(array):
    return torch.from_numpy(array).to(torch.get_default_device())


def drawn_trees(rng):
    """Rows of trees of up to 12 tokens, some chains, whose samples are often some draft."""
    rows = []
    for num_new in rng.integers(1, 13, 4):
        parents = [int(rng.integers(max(0, at - 3), at)) for at in range(1, num_new)]
        rows.append(np.array([-1, *parents], dtype=np.int32))
    num_new = np.array([len(own) for own in rows], dtype=np.int32)
    prefix_lens = rng.integers(0, 4, len(rows), dtype=np.int32)
    plan = StepPlan(
        step_id=0,
        is_decode=False,
        slots=rng.permutation(6)[: len(rows)].astype(np.int32),
        num_new_tokens=num_new,
        prefix_lens=prefix_lens,
        samples=num_new,
        input_ids=np.arange(num_new.sum(), dtype=np.int32),
        out_cache_loc=rng.permutation(60)[: num_new.sum()].astype(np.int32),
        parents=np.concatenate(rows),
    )
    places = ranges(prefix_lens, num_new).astype(np.int32)
    return plan, StepTrees.of(plan, places, torch.get_default_device())


def check_paths():
    """And what moves along them."""
    run_lens = set()
    for seed in range(25):
        rng = np.random.default_rng(seed)
        plan, trees = drawn_trees(rng)
        # Drafts behind one token differ.
        ids, locs = (on_device(own).long() for own in (plan.input_ids, plan.out_cache_loc))
        sampled = on_device(rng.integers(-1, 3, len(ids), dtype=np.int32))
        children = [(trees.parents == at).nonzero().flatten().tolist() for at in range(len(ids))]
        for at, own in enumerate(children):
            if own and rng.random() < 0.7:
                sampled[at] = int(ids[rng.choice(own)])
        found = hold_paths(trees, sampled, ids, locs)
        wanted = step_trees.hold_paths(trees, sampled.long(), ids, locs)
        assert torch.equal(found.run_lens, wanted.run_lens)
        assert torch.equal(found.sources, wanted.sources)
        firsts = trees.starts[:-1].tolist()
        for first, run_len in zip(firsts, wanted.run_lens.tolist(), strict=True):
            own = slice(first, first + run_len)
            assert torch.equal(found.samples[own], wanted.samples[own])
        run_lens |= set(wanted.run_lens.tolist())
        check_lines(trees, found, locs)
        slots = on_device(np.repeat(plan.slots, plan.num_new_tokens)).long()
        table = on_device(rng.integers(0, 60, (6, 20), dtype=np.int32))
        positions = on_device(trees.shape.positions).long()
        places = on_device(trees.shape.places).long()
        own = trees, positions, places, slots, locs, table
        both = zip(find_before(*own), tree_kernels.find_before(*own), strict=True)
        assert all(torch.equal(*pair) for pair in both)
    assert run_lens >= {1, 2, 3, 4}


def check_lines(trees, lined, targets):
    for size, dtype in (((3, 32), torch.bfloat16), ((1, 5), torch.uint8)):
        tokens = torch.randint(0, 100, (2, 60, *size)).to(dtype)
        wanted = tokens.index_copy(1, targets, tokens.index_select(1, lined.sources))
        line_up(tokens, lined.sources, targets, trees.starts, lined.run_lens)
        assert torch.equal(tokens, wanted)


def check_ancestors(num_rows, num_tokens):
    own = torch.arange(num_rows * num_tokens)
    firsts = own // num_tokens * num_tokens
    drawn = (torch.rand(len(own)) * (own - firsts)).long() + firsts
    chain = (own - 1).clamp(min=0)
    for parents in (drawn, torch.where(own == firsts, own, chain), own):
        cells = torch.zeros(len(own) * num_tokens, dtype=torch.bool)
        mark_ancestors(parents, num_tokens, cells)
        assert torch.equal(cells, sees_ancestors(parents, firsts, num_tokens).view(-1))


if __name__ == "__main__":
    torch.manual_seed(0)
    run_one_kernel_at_a_time()
    with torch.inference_mode():
        for widths in SHAPES:
            check_growth(widths, 37, torch.float32)
            check_growth(widths, 37, torch.float32, round_to=1.0)
        check_growth((4, 3), 2 * 2048 + 5, torch.bfloat16, round_to=0.5, has_names=True)
        check_growth((3, 2), (1 << 16) + 3, torch.float32)
        narrow = torch.tensor([[4, 2, 1], [1, 1, 1], [2, 0, 0]])
        check_growth((4, 4, 2), 37, torch.float32, has_names=True, own_widths=narrow)
        check_growth((4, 4, 2), 37, torch.float32, spoilt=(1,), own_widths=narrow)
        check_growth((4, 4), 37, torch.float32, spoilt=(1,))
        check_states(5, 96, torch.bfloat16)
        check_states(9, 1500, torch.float32)
        nothing = carry_states(torch.empty(2, 0), torch.empty(2, 1, 0), torch.zeros(2, 3).long())
        assert nothing.numel() == 0
        check_paths()
        for num_rows, num_tokens in ((1, 17), (3, 5), (2, 33)):
            check_ancestors(num_rows, num_tokens)
    print("all equal")
