"""Drafts for ranks that know of none: what they are sent has its tokens named and its lengths true.

For devices that the host runs ahead of, and proposers that look things up on the host; or for ranks
that make the drafts and tell afterwards which (name_drafts). A step that verifies drafts, or
follows one that does, waits for the step before; while it runs, that one is committed and the next
one scheduled. Other steps are launched ahead, as without drafts. What holds is found out here, from
the samples, so that graphs and ranks know nothing of it; the sampler finds out for itself what to
count for penalties.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch

from workers.constraints.masks import StepMasks
from workers.kv_cache.radix_node import EMPTY
from workers.runner.executor import PendingStep, StepExecutor, StepOutcome
from workers.scheduler.plan import DRAFT_TOKEN, IntArray, StepPlan, StepResult
from workers.scheduler.plan_tree import PlanTrees
from workers.speculation.chain import ChainVerifier
from workers.speculation.config import SpeculativeConfig
from workers.speculation.factory import make_proposer
from workers.speculation.history import TokenHistory
from workers.speculation.proposer import Proposer
from workers.speculation.rank_proposer import RankProposer
from workers.speculation.rank_tree_proposer import RankTreeProposer
from workers.speculation.runs import HostRuns, observed_step, ranges, result_of_runs
from workers.speculation.tree import TreeVerifier, in_path_order
from workers.speculation.verifier import Verifier

NO_WAIT_S = float("inf")

_HOST = torch.device("cpu")

NameDrafts = Callable[[StepPlan], StepPlan]
"""A plan that has been launched, with its drafts named. Waits for who makes them."""


def has_named_drafts(plan: StepPlan) -> StepPlan:
    """Of plans whose drafts the host has named before."""
    return plan


@dataclass(frozen=True, slots=True)
class SampledRows:
    """The samples of a step, and how many of each sampling row hold.

    slots, positions: int32 (num samples,), of each sample; token_ids: int64 of as many. run_lens,
    next_ids: int64 (num sampling rows,), how many hold and the last that does. num_samples: int32
    of as many rows. order: int64 (num samples,), which sample of the result stands where; None
    where each is in its place.
    """

    slots: IntArray
    positions: IntArray
    token_ids: torch.Tensor
    run_lens: torch.Tensor
    next_ids: torch.Tensor
    num_samples: IntArray
    order: torch.Tensor | None = None

    @classmethod
    def of_one_each(cls, plan: StepPlan, result: StepResult) -> Self:
        """Of a plan without runs."""
        sampling = plan.samples > 0
        token_ids = torch.from_numpy(result.token_ids.astype(np.int64))
        return cls(
            plan.slots[sampling],
            (plan.prefix_lens + plan.num_new_tokens)[sampling],
            token_ids,
            torch.ones_like(token_ids),
            token_ids,
            plan.samples[sampling],
        )

    @classmethod
    def of_runs(
        cls, plan: StepPlan, result: StepResult, verifier: Verifier, tree_verifier: TreeVerifier
    ) -> Self:
        """Raises ValueError where the result has another number of samples than the plan."""
        sampling = plan.samples > 0
        num_samples = plan.samples.copy()
        # Of a row that there was no memory for one token is told, which means nothing.
        failed = np.array(result.failed_rows, dtype=np.int64)
        num_samples[failed] = np.minimum(num_samples[failed], 1)
        num_samples = num_samples[sampling]
        firsts = (np.cumsum(plan.num_new_tokens) - plan.samples)[sampling]
        behind = ranges(firsts, num_samples)
        if len(result.token_ids) != len(behind):
            raise ValueError(
                f"step {plan.step_id} samples {len(behind)} tokens, its result has "
                f"{len(result.token_ids)}"
            )
        offsets = (plan.prefix_lens + plan.num_new_tokens - plan.samples)[sampling] + 1
        token_ids = torch.from_numpy(result.token_ids.astype(np.int64))
        inputs = torch.from_numpy(plan.input_ids[behind].astype(np.int64))
        order = None
        if plan.has_trees:
            trees = PlanTrees.of_samples(plan.parents[behind], num_samples)
            run_lens, order = tree_verifier.accept(token_ids, inputs, num_samples, trees)
            token_ids = token_ids[order]
        else:
            run_lens = verifier.accept(token_ids, inputs, num_samples)
        last = torch.from_numpy(np.cumsum(num_samples) - num_samples) + run_lens - 1
        return cls(
            np.repeat(plan.slots[sampling], num_samples),
            ranges(offsets, num_samples).astype(np.int32),
            token_ids,
            run_lens,
            token_ids[last],
            num_samples,
            order,
        )

    def without(self, slots: set[int]) -> tuple[IntArray, IntArray, torch.Tensor]:
        """Slots, positions and token ids of the other slots' samples."""
        if not slots:
            return self.slots, self.positions, self.token_ids
        kept = np.isin(self.slots, list(slots), invert=True)
        return self.slots[kept], self.positions[kept], self.token_ids[torch.from_numpy(kept)]


class DraftedStep:
    """A step under way. plan: as it runs; planned: as it was scheduled, for whom the outcome is.

    waited_until_s: when the step ended that its drafts waited for: their making counts as part of
    this one. NO_WAIT_S for none. draft_s: how long that took. name_drafts: of plan, whose ranks may
    have made them.
    """

    def __init__(
        self,
        planned: StepPlan,
        plan: StepPlan,
        pending: PendingStep,
        verifier: Verifier,
        tree_verifier: TreeVerifier,
        waited_until_s: float,
        draft_s: float,
        name_drafts: NameDrafts = has_named_drafts,
    ) -> None:
        self.plan = plan
        self._name_drafts = name_drafts
        self._draft_s = draft_s
        self._has_runs = planned.has_runs
        self._pending = pending
        self._verifier = verifier
        self._tree_verifier = tree_verifier
        self._waited_until_s = waited_until_s
        self._ended: tuple[StepOutcome, SampledRows] | None = None
        self._outcome: StepOutcome | None = None

    @property
    def has_ended(self) -> bool:
        """Whether anybody has waited for it."""
        return self._ended is not None

    @property
    def samples(self) -> SampledRows:
        """Waits for them."""
        return self._end()[1]

    @property
    def finished_s(self) -> float:
        """Waits until then."""
        return self._end()[0].finished_s

    def outcome(self) -> StepOutcome:
        if self._outcome is None:
            outcome, samples = self._end()
            result = outcome.result
            if samples.order is not None:
                result = in_path_order(result, samples.order)
            if self._has_runs:
                run_lens = samples.run_lens.numpy().astype(np.int32)
                result = result_of_runs(result, run_lens, samples.num_samples)
            started_s = min(outcome.started_s, self._waited_until_s)
            self._outcome = StepOutcome(
                result,
                started_s,
                outcome.finished_s,
                outcome.attention,
                self._draft_s,
                outcome.experts,
            )
        return self._outcome

    def _end(self) -> tuple[StepOutcome, SampledRows]:
        if self._ended is None:
            outcome = self._pending.outcome()
            if self.plan.has_runs:
                named = self._name_drafts(self.plan)
                verifiers = self._verifier, self._tree_verifier
                samples = SampledRows.of_runs(named, outcome.result, *verifiers)
            else:
                samples = SampledRows.of_one_each(self.plan, outcome.result)
            self._ended = outcome, samples
        return self._ended


class DraftingExecutor:
    """A StepExecutor around one that launches plans without drafts left to propose."""

    def __init__(
        self,
        inner: StepExecutor,
        runs: HostRuns,
        proposer: Proposer,
        verifier: Verifier,
        name_drafts: NameDrafts = has_named_drafts,
    ) -> None:
        """runs: over a table and a history on the CPU, which nobody else writes to."""
        self._inner = inner
        self._name_drafts = name_drafts
        self._runs = runs
        self._proposer = proposer
        self._verifier = verifier
        self._tree_verifier = TreeVerifier()
        self._last_plan: StepPlan | None = None
        # Steps whose samples the history lacks, and the slots that others have taken over since.
        self._untold: deque[tuple[DraftedStep, set[int]]] = deque()

    def launch(self, plan: StepPlan) -> PendingStep:
        has_drafts = bool((plan.input_ids == DRAFT_TOKEN).any())
        waited_until_s = self._take_in(has_drafts)
        for _, lost_slots in self._untold:
            lost_slots.update(request.slot for request in plan.admitted)
        begun_s = time.perf_counter()
        exact = self._runs.exact(plan)
        draft_s = time.perf_counter() - begun_s if has_drafts else 0.0
        # Behind a run the device does not know what holds, however many steps ago that was.
        exact = self._runs.with_last_tokens(exact, self._unheard_slots())
        self._runs.expect(exact)
        pending = self._inner.launch(exact)
        step = DraftedStep(
            plan,
            exact,
            pending,
            self._verifier,
            self._tree_verifier,
            waited_until_s if has_drafts else NO_WAIT_S,
            draft_s,
            self._name_drafts,
        )
        self._untold.append((step, set()))
        self._last_plan = exact
        return step

    def named(self, plan: StepPlan) -> StepPlan:
        if self._last_plan is None or self._last_plan.step_id != plan.step_id:
            raise RuntimeError(f"step {plan.step_id} is not the one that was launched last")
        return self._name_drafts(self._last_plan)

    def provide(self, masks: StepMasks) -> None:
        self._inner.provide(masks)

    def forget_masks(self) -> None:
        self._inner.forget_masks()

    def prepare_while_idle(self) -> bool:
        return self._inner.prepare_while_idle()

    def close(self) -> None:
        self._inner.close()

    def _unheard_slots(self) -> IntArray:
        """Whose last samples the device alone knows."""
        sampling = [step.plan.slots[step.plan.samples > 0] for step, _ in self._untold]
        return np.concatenate(sampling) if sampling else EMPTY

    def _take_in(self, has_drafts: bool) -> float:
        """Samples of steps that have ended; of all, where drafts go on from them or their lengths
        are in doubt. Returns when the last one ended, if that had to be waited for."""
        waited_until_s = NO_WAIT_S
        while self._untold:
            step, lost_slots = self._untold[0]
            if not (step.has_ended or has_drafts or step.plan.has_runs):
                break
            waited_until_s = NO_WAIT_S if step.has_ended else step.finished_s
            self._tell(step, lost_slots)
            self._untold.popleft()
        return waited_until_s

    def _tell(self, step: DraftedStep, lost_slots: set[int]) -> None:
        plan, samples = step.plan, step.samples
        if plan.has_runs:
            self._runs.take_in(
                samples.slots,
                samples.positions,
                samples.token_ids,
                samples.run_lens,
                samples.num_samples,
            )
        else:
            self._runs.hear(*samples.without(lost_slots))
        observed = observed_step(plan, samples.run_lens, samples.next_ids)
        self._proposer.observe(observed.without(lost_slots))


def drafting_executor(
    inner: StepExecutor,
    speculation: SpeculativeConfig,
    num_slots: int,
    max_context_len: int,
    verifier: Verifier,
) -> DraftingExecutor:
    """Drafts are looked up on the host."""
    history = TokenHistory(num_slots, max_context_len, _HOST)
    proposer = make_proposer(speculation.method, history, speculation.tree)
    runs = _host_runs(num_slots, max_context_len, history, proposer)
    return DraftingExecutor(inner, runs, proposer, verifier)


def rank_drafting_executor(
    inner: StepExecutor,
    num_slots: int,
    max_context_len: int,
    verifier: Verifier,
    name_drafts: NameDrafts,
) -> DraftingExecutor:
    """The rank behind inner makes the drafts; name_drafts knows which, once it has."""
    history, proposer = TokenHistory(num_slots, max_context_len, _HOST), RankProposer()
    runs = _host_runs(num_slots, max_context_len, history, proposer)
    return DraftingExecutor(inner, runs, proposer, verifier, name_drafts)


def rank_tree_drafting_executor(
    inner: StepExecutor,
    num_slots: int,
    max_context_len: int,
    tree: Sequence[int],
    name_drafts: NameDrafts,
) -> DraftingExecutor:
    """As rank_drafting_executor, of trees. tree: drafts at each depth."""
    history, proposer = TokenHistory(num_slots, max_context_len, _HOST), RankTreeProposer(tree)
    runs = _host_runs(num_slots, max_context_len, history, proposer)
    return DraftingExecutor(inner, runs, proposer, ChainVerifier(), name_drafts)


def _host_runs(
    num_slots: int, max_context_len: int, history: TokenHistory, proposer: Proposer
) -> HostRuns:
    table = torch.from_numpy(np.zeros((num_slots, max_context_len), dtype=np.int32))
    return HostRuns(table, history, proposer)
