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

import numpy as np
import torch

from workers.constraints.masks import StepMasks
from workers.errors import EngineFailedError
from workers.kv_cache.radix_node import EMPTY
from workers.runner.executor import PendingStep, StepExecutor, StepOutcome
from workers.runner.sampled_rows import AskedSamples, SampledRows
from workers.scheduler.plan import DRAFT_TOKEN, IntArray, StepPlan, StepResult
from workers.speculation.chain import HostChainVerifier
from workers.speculation.config import SpeculativeConfig
from workers.speculation.factory import make_proposer
from workers.speculation.history import TokenHistory
from workers.speculation.proposer import Proposer
from workers.speculation.rank_proposer import RankProposer
from workers.speculation.rank_tree_proposer import RankTreeProposer
from workers.speculation.runs import HostRuns, RankRuns, RankTreeRuns, observed_step, result_of_runs
from workers.speculation.tree import TreeVerifier, in_path_order
from workers.speculation.verifier import HostVerifier

_HOST = torch.device("cpu")

NameDrafts = Callable[[StepPlan], StepPlan]
"""A plan that has been launched, with its drafts named. Waits for who makes them."""


def has_named_drafts(plan: StepPlan) -> StepPlan:
    """Of plans whose drafts the host has named before."""
    return plan


class DraftedStep:
    """A step under way. plan: as it runs; planned: as it was scheduled, for whom the outcome is.

    waited_for: the step that its drafts waited for, to whose end they reach back: their making
    counts as part of this one. draft_s: how long that took. name_drafts: of plan, whose ranks may
    have made them.

    Samples are there as soon as the device has drawn them. What else there is of a step is worked
    out by outcome, while the device is at the next one.
    """

    def __init__(
        self,
        planned: StepPlan,
        plan: StepPlan,
        pending: PendingStep,
        verifier: HostVerifier,
        tree_verifier: TreeVerifier,
        waited_for: "DraftedStep | None",
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
        self._waited_for = waited_for
        self._ended: tuple[StepResult, SampledRows] | None = None
        self._outcome: StepOutcome | None = None

    @property
    def has_ended(self) -> bool:
        """Whether anybody has waited for it."""
        return self._ended is not None

    @property
    def samples(self) -> SampledRows:
        """Waits for them."""
        return self._end()[1]

    def result(self) -> StepResult:
        return self.outcome().result

    def outcome(self) -> StepOutcome:
        if self._outcome is None:
            result, samples = self._end()
            outcome = self._pending.outcome()
            if samples.order is not None:
                result = in_path_order(result, samples.order)
            if self._has_runs:
                run_lens = samples.run_lens.astype(np.int32)
                result = result_of_runs(result, run_lens, samples.num_samples)
            started_s = outcome.started_s
            if self._waited_for is not None:
                started_s = min(started_s, self._waited_for.outcome().finished_s)
                # A chain of all steps otherwise.
                self._waited_for = None
            self._outcome = StepOutcome(
                result,
                started_s,
                outcome.finished_s,
                outcome.attention,
                self._draft_s,
                outcome.experts,
            )
        return self._outcome

    def _end(self) -> tuple[StepResult, SampledRows]:
        if self._ended is None:
            # Drafts are made long before they are verified: behind the wait is no time for them.
            asked = None
            if self.plan.has_runs:
                asked = self._asked()
            result = self._pending.result()
            if asked is None:
                samples = SampledRows.of_one_each(self.plan, result)
            else:
                verifiers = self._verifier, self._tree_verifier
                samples = SampledRows.of_asked(asked, result, *verifiers)
            self._ended = result, samples
        return self._ended

    def _asked(self) -> AskedSamples:
        """Raises what the step raised, where it has failed before its drafts were made."""
        try:
            return AskedSamples.of(self._name_drafts(self.plan))
        except EngineFailedError:
            self._pending.result()
            raise


class DraftingExecutor:
    """A StepExecutor around one that launches plans without drafts left to propose."""

    def __init__(
        self,
        inner: StepExecutor,
        runs: HostRuns,
        proposer: Proposer,
        verifier: HostVerifier,
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
        has_drafts = not plan.is_decode and bool((plan.input_ids == DRAFT_TOKEN).any())
        planned = self._runs.planned(plan)
        waited_for = self._take_in(has_drafts)
        for _, lost_slots in self._untold:
            lost_slots.update(request.slot for request in plan.admitted)
        begun_s = time.perf_counter()
        # Behind a run the device does not know what holds, however many steps ago that was.
        exact = self._runs.made_exact(planned, self._unheard_slots())
        draft_s = time.perf_counter() - begun_s if has_drafts else 0.0
        pending = self._inner.launch(exact)
        self._runs.expect(exact)
        step = DraftedStep(
            plan,
            exact,
            pending,
            self._verifier,
            self._tree_verifier,
            waited_for if has_drafts else None,
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

    def _take_in(self, has_drafts: bool) -> DraftedStep | None:
        """Samples of steps that have ended; of all, where drafts go on from them or their lengths
        are in doubt. Returns the last one, if that had to be waited for."""
        waited_for = None
        while self._untold:
            step, lost_slots = self._untold[0]
            if not (step.has_ended or has_drafts or step.plan.has_runs):
                break
            waited_for = None if step.has_ended else step
            self._tell(step, lost_slots)
            self._untold.popleft()
        return waited_for

    def _tell(self, step: DraftedStep, lost_slots: set[int]) -> None:
        plan, samples = step.plan, step.samples
        if plan.has_runs:
            self._runs.take_in(
                samples.slots,
                samples.positions,
                samples.token_ids,
                samples.run_lens,
                samples.starts,
            )
        else:
            self._runs.hear(*samples.without(lost_slots))
        self._observe(step, lost_slots)

    def _observe(self, step: DraftedStep, lost_slots: set[int]) -> None:
        """Who proposes drafts is told what holds."""
        samples = step.samples
        told = torch.from_numpy(samples.run_lens), torch.from_numpy(samples.next_ids)
        observed = observed_step(step.plan, *told)
        self._proposer.observe(observed.without(lost_slots))


class RankDraftingExecutor(DraftingExecutor):
    """As DraftingExecutor, for ranks that make the drafts: the next plan tells them what holds."""

    def _observe(self, step: DraftedStep, lost_slots: set[int]) -> None:
        """No proposer on the host is to know."""


def drafting_executor(
    inner: StepExecutor,
    speculation: SpeculativeConfig,
    num_slots: int,
    max_context_len: int,
    verifier: HostVerifier,
) -> DraftingExecutor:
    """Drafts are looked up on the host."""
    history = TokenHistory(num_slots, max_context_len, _HOST)
    proposer = make_proposer(speculation.method, history, speculation.tree)
    runs = HostRuns(_host_table(num_slots, max_context_len), history, proposer)
    return DraftingExecutor(inner, runs, proposer, verifier)


def rank_drafting_executor(
    inner: StepExecutor,
    num_slots: int,
    max_context_len: int,
    verifier: HostVerifier,
    name_drafts: NameDrafts,
) -> DraftingExecutor:
    """The rank behind inner makes the drafts; name_drafts knows which, once it has."""
    runs = rank_runs(num_slots, max_context_len)
    return RankDraftingExecutor(inner, runs, RankProposer(), verifier, name_drafts)


def rank_runs(num_slots: int, max_context_len: int) -> RankRuns:
    """Of a rank that makes chains."""
    history = TokenHistory(num_slots, max_context_len, _HOST)
    return RankRuns(_host_table(num_slots, max_context_len), history, RankProposer())


def rank_tree_drafting_executor(
    inner: StepExecutor,
    num_slots: int,
    max_context_len: int,
    tree: Sequence[int],
    name_drafts: NameDrafts,
) -> DraftingExecutor:
    """As rank_drafting_executor, of trees. tree: drafts at each depth."""
    runs, proposer = rank_tree_runs(num_slots, max_context_len, tree)
    return RankDraftingExecutor(inner, runs, proposer, HostChainVerifier(), name_drafts)


def rank_tree_runs(
    num_slots: int, max_context_len: int, tree: Sequence[int]
) -> tuple[HostRuns, RankTreeProposer]:
    """Of a rank that makes trees."""
    history, proposer = TokenHistory(num_slots, max_context_len, _HOST), RankTreeProposer(tree)
    return RankTreeRuns(_host_table(num_slots, max_context_len), history, proposer), proposer


def _host_table(num_slots: int, max_context_len: int) -> torch.Tensor:
    """As of HostRuns."""
    return torch.from_numpy(np.zeros((num_slots, max_context_len), dtype=np.int32))
