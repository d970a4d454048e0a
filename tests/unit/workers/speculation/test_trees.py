"""Trees of drafts by hand: which grow, which of their paths holds, and what is moved for it."""

import json

import msgspec
import numpy as np
import pytest
import torch

from attention.memory.token_to_kv_pool import MHATokenToKVPool
from tests.unit.workers.speculation.test_ngram import int32
from workers.config import EngineConfig
from workers.engine.logprobs import TokenLogprobs
from workers.errors import ConfigError
from workers.parallel.group import SingleRank
from workers.runner.factory import make_model_runner
from workers.runner.sampled_rows import AskedSamples, SampledRows
from workers.sampling.logprobs import LogprobTensors, SampledLogprobs
from workers.sampling.run_drafts import RunDrafts
from workers.sampling.state import SampledTokens
from workers.scheduler.plan import DRAFT_TOKEN, NAN_TOKEN, StepPlan, StepResult
from workers.scheduler.plan_tree import PlanTrees
from workers.speculation.adaptive import AdaptiveLength
from workers.speculation.chain import HostChainVerifier
from workers.speculation.policy import DecodeShape
from workers.speculation.proposer import DraftRows
from workers.speculation.rank_tree_proposer import RankTreeProposer
from workers.speculation.runs import may_branch
from workers.speculation.suffix_tree import NO_TOKEN, grow_by_counts
from workers.speculation.tree import TreeVerifier, in_order, in_path_order
from workers.speculation.tree_shape import Continuations, GrowingTree, fitted, joined

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
# Two rows: one of drafts 11, 12 behind the root, 13, 14 behind 12 and 15 behind 14; a plain one.
PLAN = StepPlan(
    step_id=0,
    is_decode=False,
    slots=int32(3, 1),
    num_new_tokens=int32(6, 1),
    prefix_lens=int32(20, 7),
    samples=int32(6, 1),
    input_ids=int32(10, 11, 12, 13, 14, 15, 40),
    out_cache_loc=int32(50, 51, 52, 53, 54, 55, 90),
    parents=int32(-1, 0, 0, 2, 2, 4, -1),
)
PLACES = int32(20, 21, 22, 23, 24, 25, 7)


def test_a_plans_trees_have_depths_paths_and_positions():
    trees = PlanTrees.of(PLAN, PLACES)
    assert trees.depths.tolist() == [0, 1, 1, 2, 2, 3, 0]
    assert trees.positions.tolist() == [20, 21, 21, 22, 22, 23, 7]
    assert trees.parents.tolist() == [0, 0, 0, 2, 2, 4, 6]
    assert trees.paths[5].tolist() == [0, 2, 4, 5]
    assert trees.paths[1].tolist() == [0, 1, 1, 1]
    assert [own.tolist() for own in trees.rows] == [[-1, 0, 0, 2, 2, 4], [-1]]


@pytest.mark.parametrize(
    ("sampled", "run_len", "first"),
    [
        ([12, 0, 14, 0, 15, 77], 4, [0, 2, 4, 5]),
        ([11, 70, 14, 0, 15, 77], 2, [0, 1]),
        ([99, 12, 14, 0, 15, 77], 1, [0]),
        # 15 is right behind a draft that is not.
        ([12, 0, 13, 71, 15, 77], 3, [0, 2, 3]),
    ],
)
def test_the_path_of_right_drafts_holds_and_comes_first(sampled, run_len, first):
    trees = PlanTrees.of(PLAN, PLACES)
    token_ids, behind = torch.tensor([*sampled, 41]), torch.from_numpy(PLAN.input_ids).long()
    held = TreeVerifier().accept(token_ids, behind, PLAN.samples, trees)
    assert held.run_lens.tolist() == [run_len, 1]
    assert held.order[:run_len].tolist() == first
    assert sorted(held.order[:6].tolist()) == [*range(6)]
    assert held.order[6] == 6


def test_the_host_finds_paths_in_what_a_rank_sampled_and_nothing_of_rows_that_failed():
    """Two rows with trees, of which the second has had no memory."""
    plan = msgspec.structs.replace(
        PLAN,
        num_new_tokens=int32(6, 3),
        samples=int32(6, 3),
        input_ids=int32(10, 11, 12, 13, 14, 15, 40, 41, 42),
        out_cache_loc=int32(50, 51, 52, 53, 54, 55, 90, 91, 92),
        parents=int32(-1, 0, 0, 2, 2, 4, -1, 0, 0),
    )
    logprobs = (*(TokenLogprobs(-float(index), 1, [], []) for index in range(6)), None)
    sampled = int32(12, 0, 14, 0, 15, 77, NAN_TOKEN)
    result = StepResult(sampled, logprobs, failed_rows=(1,))
    rows = SampledRows.of_asked(AskedSamples.of(plan), result, HostChainVerifier(), TreeVerifier())
    assert rows.run_lens.tolist() == [4, 1]
    assert rows.next_ids.tolist() == [77, NAN_TOKEN]
    assert rows.token_ids[:4].tolist() == [12, 14, 15, 77]
    assert rows.positions.tolist() == [21, 22, 23, 24, 25, 26, 8]
    told = in_path_order(result, rows.order)
    assert told.token_ids[:4].tolist() == [12, 14, 15, 77]
    assert [one.logprob for one in told.logprobs[:4]] == [0.0, -2.0, -4.0, -5.0]


def test_samples_come_in_the_paths_order_with_their_log_probabilities():
    values = torch.arange(2.0)
    tops = torch.zeros(2, 0)
    tensors = LogprobTensors(values, values.long(), tops.long(), tops)
    # Rows of two samples, of which the second one's slot has asked.
    logprobs = SampledLogprobs(tensors, int32(-1, -1, 0, 0), int32(0, 0, 0, 0), 0)
    sampled = SampledTokens(torch.arange(4), torch.tensor([False, True, False, False]), logprobs)
    turned = in_order(sampled, torch.tensor([1, 0, 3, 2]))
    assert turned.token_ids.tolist() == [1, 0, 3, 2]
    assert turned.has_nan.tolist() == [True, False, False, False]
    told = turned.logprobs.read()
    assert [one and one.logprob for one in told] == [None, None, 1.0, 0.0]


def test_what_looks_back_sees_the_drafts_on_the_path_only():
    drafts = RunDrafts.of(PLAN, PlanTrees.of(PLAN, PLACES))
    (before,) = drafts.before(np.arange(7), CPU)
    seen = [row[: int(num)] for row, num in zip(before.token_ids.tolist(), before.num, strict=True)]
    assert seen == [[], [11], [12], [12, 13], [12, 14], [12, 14, 15], []]
    held = before.held(torch.tensor([12, 0, 14, 0, 15, 77, 41]))
    assert held.holds.tolist() == [True, False, True, False, True, True, True]
    assert held.last.tolist() == [5, 6]


def test_moved_tokens_are_read_before_any_is_written():
    pool = MHATokenToKVPool.__new__(MHATokenToKVPool)
    pool._k = torch.arange(2 * 8.0).view(2, 4, 2, 1, 1)
    pool._v = -pool._k
    before = pool._k.flatten(1, 2).clone()
    pool.move_tokens(torch.tensor([3, 2, 5]), torch.tensor([2, 3, 4]))
    expected = before[:, [0, 1, 3, 2, 5, 5, 6, 7]]
    assert torch.equal(pool._k.flatten(1, 2), expected)
    assert torch.equal(pool._v.flatten(1, 2), -expected)


@pytest.mark.parametrize(
    ("most", "widths"),
    [(20, (4, 3, 2)), (9, (4, 3, 2)), (8, (3, 3, 2)), (5, (1, 1, 1)), (2, (1, 1))],
)
def test_a_tree_with_less_room_is_narrower_then_shorter(most, widths):
    assert fitted((4, 3, 2), most) == widths


def test_a_tree_grows_by_what_is_likeliest_with_all_before_it():
    tree = GrowingTree((2, 2))
    tree.grow(Continuations(int32(0, 0, 0), np.array([5, 6, 7]), np.log([0.1, 0.6, 0.3])))
    assert (tree.token_ids, tree.parents) == ([6, 7], [0, 0])
    assert [*tree.newest] == [1, 2]
    joint = np.log([0.6 * 0.4, 0.6 * 0.3, 0.3 * 0.9, 0.3 * 0.1])
    tree.grow(Continuations(int32(1, 1, 2, 2), np.array([8, 9, 8, 9]), joint))
    assert (tree.token_ids, tree.parents) == ([6, 7, 8, 8], [0, 0, 2, 1])


def test_places_that_end_alike_branch_where_they_differ():
    tree = GrowingTree((2, 3, 1))
    places = int32(1, 2, 3, 1, 4, 5, 6, 2, NO_TOKEN, 1, 4, 5, 1, 2, 9).reshape(5, 3)
    grow_by_counts(tree, places)
    assert tree.token_ids == [1, 6, 2, 4, 2, 5]
    assert tree.parents == [0, 0, 1, 1, 2, 4]
    nothing = GrowingTree((2, 2))
    grow_by_counts(nothing, int32(NO_TOKEN, NO_TOKEN).reshape(1, 2))
    assert nothing.token_ids == []


def test_where_no_row_branches_there_are_no_trees():
    chain, tree = GrowingTree((1, 1)), GrowingTree((2, 1))
    for one in (chain, tree):
        one.grow(Continuations(int32(0, 0), np.array([5, 6]), np.log([0.9, 0.1])))
    assert joined([chain], 3).parents is None
    both = joined([chain, tree], 3)
    assert both.num_drafts.tolist() == [1, 2]
    assert both.token_ids.tolist() == [[5, 0, 0], [5, 6, 0]]
    assert both.parents is not None


def test_rows_with_a_grammar_and_steps_with_prompts_have_chains():
    slots = int32(3, 1)
    assert may_branch(PLAN, slots).tolist() == [True, True]
    masked = StepPlan(**{**fields(PLAN), "masked_slots": int32(3)})
    assert may_branch(masked, slots).tolist() == [False, True]
    prompt = StepPlan(**{**fields(PLAN), "samples": int32(6, 0)})
    assert may_branch(prompt, slots).tolist() == [False, False]


def fields(plan: StepPlan) -> dict[str, object]:
    return {name: getattr(plan, name) for name in StepPlan.__struct_fields__}


def test_of_a_tree_all_or_none_is_chosen():
    policy, most = AdaptiveLength(9, has_trees=True), np.full(4, 9, dtype=np.int32)
    for _ in range(50):
        chosen = policy.choose(most)
        assert chosen in (0, 9)
        if chosen:
            policy.observe_run(9, 2)
        policy.observe_step(DecodeShape(4, chosen), 1e-3 * (1.0 + chosen / 20))
    assert policy.choose(most) == 9


def test_a_rank_is_told_how_many_drafts_stand_at_each_depth():
    proposer = RankTreeProposer((3, 2, 1))
    may_branch = np.array([True, False, True, True])
    drafts = proposer.propose(DraftRows(*[int32(*[9] * 4)] * 2, int32(9, 9, 5, 2), may_branch))
    assert drafts.num_drafts.tolist() == [6, 3, 5, 2]
    own = [row[:num].tolist() for row, num in zip(drafts.parents, drafts.num_drafts, strict=True)]
    assert own == [[0, 0, 0, 1, 1, 4], [0, 1, 2], [0, 0, 1, 1, 3], [0, 1]]
    assert set(drafts.token_ids.flatten().tolist()) == {DRAFT_TOKEN}
    chains = proposer.propose(DraftRows(int32(1), int32(9), int32(9)))
    assert (chains.num_drafts.tolist(), chains.parents) == ([3], None)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"speculative": "ngram", "draft_tree": (2, 2)},
            "ngram proposes chains, trees do draft,",
        ),
        ({"speculative": "suffix", "draft_tree": (2, 0)}, "at least 1 draft at each depth"),
        ({"speculative": "suffix", "draft_tree": (30, 3)}, "and 32 in all"),
    ],
)
def test_a_tree_that_cannot_be_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"tp_size": 2}, "tp_size=2: trees are verified on one GPU only"),
        ({"tp_size": 2, "speculative": "suffix"}, "tp_size=2: trees are verified on one GPU"),
        ({"attention_backend": "auto-tuned"}, "attention by auto-tuned: what attends to trees"),
    ],
)
def test_what_trees_on_a_gpu_have_not_is_refused_by_name(settings, reason):
    asked = {"speculative": "draft:builtin-draft", "draft_tree": (2, 2), **settings}
    with pytest.raises(ConfigError, match=rf"draft_tree=\[2, 2\] and {reason}"):
        make_model_runner(EngineConfig(**asked), SingleRank(), CUDA, lambda done, total: None)


def test_a_tree_that_nobody_proposes_is_refused():
    with pytest.raises(ConfigError, match=r"draft_tree=\[2, 2\] and nobody .* speculative, or"):
        make_model_runner(
            EngineConfig(draft_tree=(2, 2)), SingleRank(), CPU, lambda done, total: None
        )


def test_latents_have_no_trees_on_a_gpu_which_no_weight_is_read_for(tmp_path):
    """The folder has none."""
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]})
    )
    config = EngineConfig(model=str(tmp_path), speculative="mtp", draft_tree=(2, 2))
    with pytest.raises(ConfigError, match="keys and values of heads verify trees"):
        make_model_runner(config, SingleRank(), CUDA, lambda done, total: None)
