"""What may share a step. Knows the two kinds of rows, not how they are made."""

from typing import Protocol

from workers.scheduler.decode_batch import DecodeBatcher
from workers.scheduler.plan_draft import PlanDraft
from workers.scheduler.prefill_batch import PrefillBatcher


class BatchPolicy(Protocol):
    """Fills an empty draft; it stays empty when nothing can run now."""

    def compose(self, draft: PlanDraft, can_retract: bool) -> None: ...


class MixedBatches:
    """Decode rows first, so that no stream waits for a prompt; chunks take the rest."""

    def __init__(self, decode: DecodeBatcher, prefill: PrefillBatcher) -> None:
        self._decode = decode
        self._prefill = prefill

    def compose(self, draft: PlanDraft, can_retract: bool) -> None:
        if self._decode.add_rows(draft, can_retract):
            self._prefill.add_rows(draft)


class AlternatingBatches:
    """Prefill or decode, by turns while there is work for both, so that neither starves."""

    def __init__(self, decode: DecodeBatcher, prefill: PrefillBatcher) -> None:
        self._decode = decode
        self._prefill = prefill
        self._is_prefill_turn = True

    def compose(self, draft: PlanDraft, can_retract: bool) -> None:
        if self._is_prefill_turn:
            self._prefill.add_rows(draft)
            if not draft.is_empty:
                self._is_prefill_turn = False
                return
        if not self._decode.add_rows(draft, can_retract):
            return
        if not draft.is_empty:
            self._is_prefill_turn = True
            return
        self._prefill.add_rows(draft)
        self._is_prefill_turn = draft.is_empty
