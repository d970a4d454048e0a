"""Drafts made ahead: by a rank that can go on from samples which the host has not seen.

As a RankDraftingExecutor, whose steps wait for the step before to end and for the host to take its
samples in. Of most of them the device has made the drafts by then.
"""

from collections.abc import Sequence

from workers.runner.ahead_drafts import AheadDrafts
from workers.runner.drafting_executor import (
    DraftingExecutor,
    NameDrafts,
    RankDraftingExecutor,
    rank_runs,
    rank_tree_runs,
)
from workers.runner.executor import PendingStep, StepExecutor
from workers.scheduler.plan import StepPlan
from workers.speculation.ahead import AheadRows, AheadRuns, ChainsAhead, TreesAhead
from workers.speculation.chain import HostChainVerifier
from workers.speculation.proposer import Proposer
from workers.speculation.rank_proposer import RankProposer
from workers.speculation.runs import HostRuns
from workers.speculation.verifier import HostVerifier


class AheadDraftingExecutor(RankDraftingExecutor):
    def __init__(
        self,
        inner: StepExecutor,
        runs: HostRuns,
        proposer: Proposer,
        verifier: HostVerifier,
        name_drafts: NameDrafts,
        ahead: AheadDrafts,
        ahead_runs: AheadRuns,
    ) -> None:
        """ahead: of the rank behind inner, which launches in this thread. ahead_runs: which of its
        steps are drafted ahead."""
        super().__init__(inner, runs, proposer, verifier, name_drafts)
        self.ahead = ahead
        self._ahead_runs = ahead_runs

    def launch(self, plan: StepPlan) -> PendingStep:
        self._draft_ahead(plan)
        return super().launch(plan)

    def _draft_ahead(self, plan: StepPlan) -> None:
        """Where the step before is the only one whose samples are awaited."""
        if len(self._untold) != 1 or self._untold[0][0].has_ended:
            return
        before = self._untold[0][0].plan
        rows = AheadRows.of(plan, before, self._ahead_runs)
        if rows is not None:
            self.ahead.make(rows, before)


def ahead_drafting_executor(
    inner: StepExecutor,
    num_slots: int,
    max_context_len: int,
    name_drafts: NameDrafts,
    ahead: AheadDrafts,
) -> DraftingExecutor:
    """As rank_drafting_executor, of chains that the host verifies."""
    runs = rank_runs(num_slots, max_context_len)
    return AheadDraftingExecutor(
        inner, runs, RankProposer(), HostChainVerifier(), name_drafts, ahead, ChainsAhead()
    )


def ahead_tree_drafting_executor(
    inner: StepExecutor,
    num_slots: int,
    max_context_len: int,
    tree: Sequence[int],
    name_drafts: NameDrafts,
    ahead: AheadDrafts,
) -> DraftingExecutor:
    """As rank_tree_drafting_executor."""
    runs, proposer = rank_tree_runs(num_slots, max_context_len, tree)
    verifier, ahead_runs = HostChainVerifier(), TreesAhead(sum(tree))
    return AheadDraftingExecutor(inner, runs, proposer, verifier, name_drafts, ahead, ahead_runs)
