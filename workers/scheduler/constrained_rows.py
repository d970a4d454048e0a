"""Which rows of a step sample under a grammar, at which positions, with which drafts."""

from workers.constraints.masks import MaskRow
from workers.scheduler.plan import StepPlan, drafts_of
from workers.scheduler.plan_draft import PendingCommit
from workers.scheduler.request import ConstrainedRequest


class ConstrainedRows:
    """can_run_again: whether rows of the model may. has_drafts: whether any request may have some,
    so that planned positions may be upper bounds."""

    def __init__(self, can_run_again: bool, has_drafts: bool) -> None:
        self._can_run_again = can_run_again
        self._has_drafts = has_drafts

    def of(self, record: PendingCommit, plan: StepPlan) -> list[MaskRow]:
        """Of a plan with its drafts named, all before it being committed. Rows whose requests have
        ended are left out."""
        alive = [pair for pair in record.constrained if not pair[0].is_ended]
        if self._has_drafts:
            return self._with_drafts(record, [one for one, _ in alive], plan)
        return [
            MaskRow(one.slot, position, one, self._may_be_late(record, one))
            for one, position in alive
        ]

    def _with_drafts(
        self, record: PendingCommit, requests: list[ConstrainedRequest], plan: StepPlan
    ) -> list[MaskRow]:
        """With all before it committed, a row's first token to be sampled is the first that is not
        known. A row that was planned with drafts cannot run again, though none was found: until the
        commit its length is in doubt."""
        drafts = drafts_of(plan)
        in_doubt = {
            one.slot for one, num in zip(record.sampling, record.num_drafts, strict=False) if num
        }
        return [
            MaskRow(
                one.slot,
                one.num_tokens,
                one,
                one.slot not in in_doubt and self._may_be_late(record, one),
                drafts.get(one.slot, ()),
            )
            for one in requests
        ]

    def _may_be_late(self, record: PendingCommit, request: ConstrainedRequest) -> bool:
        """A row of whose token no state is kept, beside such that would wait for it. A prompt's
        last chunk cannot run again: its first mask was made when the grammar was compiled."""
        return self._can_run_again and record.is_shared and request not in record.completed_prefills
