"""What may share a step. Knows the two kinds of rows, not how they are made."""

from typing import Protocol

from workers.scheduler.plan_draft import PlanDraft
from workers.scheduler.prefill_batch import PrefillBatcher
from workers.scheduler.run_batch import DecodeRowAdder
from workers.scheduler.step_budget import StepTarget


class BatchPolicy(Protocol):
    """Fills an empty draft; it stays empty when nothing can run now."""

    def compose(self, draft: PlanDraft, can_retract: bool) -> None: ...


class MixedBatches:
    """Decode rows first, so that no stream waits for a prompt; chunks take what is left."""

    def __init__(self, decode: DecodeRowAdder, prefill: PrefillBatcher, target: StepTarget) -> None:
        self._decode = decode
        self._prefill = prefill
        self._target = target

    def compose(self, draft: PlanDraft, can_retract: bool) -> None:
        if self._decode.add_rows(draft, can_retract) and self._prefill.is_wanted:
            rows, keys = draft.num_decode_rows, draft.num_decode_keys
            draft.prompts = self._target.allowance(rows, keys, self._prefill.num_tokens)
            self._prefill.add_rows(draft)


class AlternatingBatches:
    """Prefill or decode, by turns while there is work for both, so that neither starves.

    What decode rows wait for is then a step of each kind; the target is for both together.
    """

    def __init__(self, decode: DecodeRowAdder, prefill: PrefillBatcher, target: StepTarget) -> None:
        self._decode = decode
        self._prefill = prefill
        self._target = target
        self._is_prefill_turn = True

    def compose(self, draft: PlanDraft, can_retract: bool) -> None:
        if self._is_prefill_turn:
            self._add_prompts(draft)
            if not draft.is_empty:
                self._is_prefill_turn = False
                return
        if not self._decode.add_rows(draft, can_retract):
            return
        if not draft.is_empty:
            self._is_prefill_turn = True
            return
        self._add_prompts(draft)
        self._is_prefill_turn = draft.is_empty

    def _add_prompts(self, draft: PlanDraft) -> None:
        if self._prefill.is_wanted:
            rows, keys = self._decode.num_rows_and_keys()
            draft.prompts = self._target.allowance(rows, keys, self._prefill.num_tokens)
            self._prefill.add_rows(draft)
