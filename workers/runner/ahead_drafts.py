"""What a rank keeps of its last step to make the next one's drafts ahead of that one's launch.

A launch in two: the drafts while the host takes in the samples that they go on from, then the
target's pass over them once the host knows all lengths.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from workers.graphs.draft_graphs import DraftGraphs
from workers.graphs.draft_rows import DrawnRows
from workers.graphs.verify_graphs import VerifiedStep
from workers.sampling.state import SampledTokens
from workers.scheduler.plan import IntArray, StepPlan
from workers.speculation.ahead import AheadRows
from workers.speculation.device_step import DeviceDrafts, DrafterStep
from workers.speculation.draft_mailbox import SentDrafts
from workers.speculation.step_trees import LinedUp

logger = logging.getLogger(__name__)


class AheadDrafts:
    """Chains of one rank, whose steps come in order. run_lens: says how many of each row's samples
    hold in place of the drafts themselves, int64 (bs,) on the device. send: of DraftMailbox: who
    waits for the drafts has them before the target's pass over them ends."""

    def __init__(self, graphs: DraftGraphs, send: Callable[[DeviceDrafts], SentDrafts]) -> None:
        self.run_lens: Callable[[DrawnRows], torch.Tensor] | None = None
        self._graphs = graphs
        self._send = send
        self._drafts: tuple[int, torch.Tensor] | None = None
        # Of the step launched last: its number, and what says what its rows have drawn.
        self._drawn: tuple[int, Callable[[], DrawnRows]] | None = None
        self._made: tuple[int, IntArray, SentDrafts] | None = None

    def verifies(self, step: DrafterStep, drafts: DeviceDrafts) -> None:
        """The step that is launched verifies these, of all of its runs."""
        is_kept = self._is_even(step) and drafts.parents is None
        self._drafts = (step.plan.step_id, drafts.token_ids) if is_kept else None

    def draws(self, plan: StepPlan, drawn: VerifiedStep | SampledTokens) -> None:
        """The step has been launched. Of one that does not verify what verifies said, nothing is
        kept. Who waits for the samples does not wait for what is made of them here."""
        own, self._drafts, self._drawn = self._drafts, None, None
        if own is not None and own[0] == plan.step_id:
            self._drawn = plan.step_id, partial(rows_of, own[1], drawn)

    @torch.inference_mode()
    def make(self, ahead: AheadRows, before: StepPlan) -> None:
        """Drafts of a plan that goes on from the step before, if that one was kept and there is a
        graph for them; else they are made as the plan is launched."""
        self._made, drawn, plan = None, self._drawn, ahead.plan
        if drawn is None or drawn[0] != before.step_id or not self._graphs.covers_ahead(ahead):
            return
        try:
            rows = drawn[1]()
            if self.run_lens is not None:
                rows = replace(rows, run_lens=self.run_lens(rows))
            sent = self._send(self._graphs.run_ahead(ahead, rows))
        except torch.OutOfMemoryError as error:
            logger.warning("no memory to make drafts of step %d ahead: %s", plan.step_id, error)
            return
        self._made = plan.step_id, plan.slots, sent

    def take(self, step: DrafterStep) -> SentDrafts | None:
        """What was made of the step's runs, which are all of its rows; None where nothing was."""
        made, self._made = self._made, None
        if made is None or made[0] != step.plan.step_id:
            return None
        _, slots, sent = made
        width = sent.drafts.token_ids.shape[1]
        if width != step.runs.width or not np.array_equal(slots, step.runs.slots):
            return None
        return sent

    def _is_even(self, step: DrafterStep) -> bool:
        """Whether all rows verify as many drafts."""
        return len(step.runs) == step.plan.batch_size and step.runs.is_even


class AheadTrees(AheadDrafts):
    """Whole trees. What holds of a step is known once its paths are lined up.

    num_drafts: of a tree. max_run_len: samples of a row that may hold."""

    def __init__(
        self,
        graphs: DraftGraphs,
        send: Callable[[DeviceDrafts], SentDrafts],
        tree: Sequence[int],
    ) -> None:
        super().__init__(graphs, send)
        self._num_drafts, self._max_run_len = sum(tree), 1 + len(tree)

    def verifies(self, step: DrafterStep, drafts: DeviceDrafts) -> None:
        is_kept = self._is_whole(step) and drafts.parents is not None
        self._drafts = (step.plan.step_id, drafts.token_ids) if is_kept else None

    def draws(self, plan: StepPlan, drawn: VerifiedStep | SampledTokens) -> None:
        """Their order is not known yet."""
        self._drawn = None

    def holds(self, step: DrafterStep, lined: LinedUp) -> None:
        """Of the step that has been launched."""
        own, self._drafts = self._drafts, None
        if own is not None and own[0] == step.plan.step_id:
            drafts, num_rows = own[1], step.plan.batch_size
            samples = lined.samples.view(num_rows, -1)[:, : self._max_run_len]
            rows = DrawnRows(drafts, samples, lined.run_lens)
            self._drawn = step.plan.step_id, lambda: rows

    def take(self, step: DrafterStep) -> SentDrafts | None:
        sent = super().take(step)
        return sent if self._is_whole(step) else None

    def _is_whole(self, step: DrafterStep) -> bool:
        is_tree = step.trees is not None and step.runs.width == self._num_drafts
        return is_tree and self._is_even(step)


def rows_of(drafts: torch.Tensor, drawn: VerifiedStep | SampledTokens) -> DrawnRows:
    """Of a step that verified these, int64 (bs, n)."""
    num_rows, num_tokens = drafts.shape[0], drafts.shape[1] + 1
    if isinstance(drawn, SampledTokens):
        return DrawnRows(drafts, drawn.token_ids.view(num_rows, num_tokens))
    # Rows stand one behind the other among the graph's, which may be longer. The device reads them
    # in the host's memory, where it has written them.
    length = num_tokens
    if num_rows > 1:
        length = (int(drawn.places[-1]) + 1 - num_tokens) // (num_rows - 1)
    sampled = drawn.slot.device_sampled[: num_rows * length].view(num_rows, length)
    return DrawnRows(drafts, sampled[:, :num_tokens])
