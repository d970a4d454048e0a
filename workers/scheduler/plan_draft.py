"""A step while it is put together: rows are added, then it becomes a StepPlan and a record of who
is in it. Decides nothing.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from workers.kv_cache.radix_node import EMPTY, IntArray
from workers.scheduler.plan import (
    LAST_SAMPLED_TOKEN,
    AdmittedRequest,
    PromptLogprobRow,
    StepPlan,
    TableWrite,
)
from workers.scheduler.request import Request


@dataclass(frozen=True, slots=True)
class StepRecord:
    """Who waits for the result of a plan that is not committed yet.

    sampling: the request of every row that yields a token, in row order. completed_prefills:
    those of them whose prefill ends with this step. prompt_logprob_rows: row, number of target
    ids, request. Requests, not slots: a slot may have a new owner when the result comes.
    """

    step_id: int
    sampling: list[Request]
    completed_prefills: list[Request]
    prompt_logprob_rows: list[tuple[int, int, Request]]


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """One token for each of the slots; all int32 (n,)."""

    slots: IntArray
    prefix_lens: IntArray
    out_cache_loc: IntArray
    requests: list[Request]

    def __len__(self) -> int:
        return len(self.slots)


_NO_DECODE_ROWS = DecodeRows(EMPTY, EMPTY, EMPTY, [])


class PlanDraft:
    """budget: new tokens that may still be added."""

    def __init__(self, step_id: int, max_step_tokens: int) -> None:
        self.step_id = step_id
        self.budget = max_step_tokens
        self._decode = _NO_DECODE_ROWS
        self._slots: list[int] = []
        self._prefix_lens: list[int] = []
        self._samples: list[bool] = []
        self._input_ids: list[IntArray] = []
        self._out_cache_loc: list[IntArray] = []
        self._admitted: list[AdmittedRequest] = []
        self._prefix_writes: list[TableWrite] = []
        self._completed: list[Request] = []
        self._prompt_logprobs: list[PromptLogprobRow] = []
        self._prompt_logprob_rows: list[tuple[int, int, Request]] = []

    @property
    def is_empty(self) -> bool:
        return not len(self._decode) and not self._slots

    def set_decode_rows(self, rows: DecodeRows) -> None:
        """Decode rows come first in a plan, and at once."""
        assert self.is_empty, "decode rows precede prefill rows"
        self._decode = rows
        self.budget -= len(rows)

    def admit(self, request: Request, prefix_indices: IntArray) -> None:
        """The request takes its slot with this step, on top of cached tokens if there are any."""
        self._admitted.append(
            AdmittedRequest(
                slot=request.slot,
                seed=request.seed,
                sampling=request.sampling,
                num_prompt_tokens=request.num_prompt_tokens,
                token_ids=request.known_tokens,
            )
        )
        if len(prefix_indices):
            self._prefix_writes.append(TableWrite(request.slot, 0, prefix_indices))

    def add_chunk(self, request: Request, start: int, out_cache_loc: IntArray) -> None:
        """Tokens start .. start + len(out_cache_loc) - 1 of a request that is being prefilled."""
        stop = start + len(out_cache_loc)
        is_last = stop == request.prefill_len
        if request.wants_prompt_logprobs:
            self._add_prompt_logprobs(request, start, stop)
        self._slots.append(request.slot)
        self._prefix_lens.append(start)
        self._samples.append(is_last)
        self._input_ids.append(request.buffer[start:stop])
        self._out_cache_loc.append(out_cache_loc)
        if is_last:
            self._completed.append(request)
        self.budget -= len(out_cache_loc)

    def build(
        self, table_writes: list[TableWrite], cleared: IntArray
    ) -> tuple[StepPlan, StepRecord]:
        """table_writes: moves of running requests, carried out before this step. cleared: what
        requests that ended have left and nobody vouches for."""
        record = StepRecord(
            self.step_id,
            self._decode.requests + self._completed,
            self._completed,
            self._prompt_logprob_rows,
        )
        num_decode = len(self._decode)
        decode_ids = np.full(num_decode, LAST_SAMPLED_TOKEN, dtype=np.int32)
        ones = np.ones(num_decode, dtype=np.int32)
        if not self._slots:
            return self._decode_plan(decode_ids, ones, table_writes, cleared), record
        lens = [len(ids) for ids in self._input_ids]
        plan = StepPlan(
            step_id=self.step_id,
            is_decode=max(lens) == 1,
            slots=_join(self._decode.slots, self._slots),
            num_new_tokens=_join(ones, lens),
            prefix_lens=_join(self._decode.prefix_lens, self._prefix_lens),
            samples=_join(ones, self._samples),
            input_ids=np.concatenate([decode_ids, *self._input_ids]),
            out_cache_loc=np.concatenate([self._decode.out_cache_loc, *self._out_cache_loc]),
            admitted=tuple(self._admitted),
            table_writes=(*table_writes, *self._prefix_writes),
            cleared=cleared,
            prompt_logprobs=tuple(self._prompt_logprobs),
        )
        return plan, record

    def _decode_plan(
        self,
        input_ids: IntArray,
        ones: IntArray,
        table_writes: list[TableWrite],
        cleared: IntArray,
    ) -> StepPlan:
        return StepPlan(
            step_id=self.step_id,
            is_decode=True,
            slots=self._decode.slots,
            num_new_tokens=ones,
            prefix_lens=self._decode.prefix_lens,
            samples=ones,
            input_ids=input_ids,
            out_cache_loc=self._decode.out_cache_loc,
            table_writes=tuple(table_writes),
            cleared=cleared,
        )

    def _add_prompt_logprobs(self, request: Request, start: int, stop: int) -> None:
        """Tokens start .. stop - 1 predict start + 1 .. stop, as far as these are the prompt's."""
        targets = request.buffer[start + 1 : min(stop + 1, request.num_prompt_tokens)]
        num_top = request.sampling.prompt_logprobs
        if num_top is None or not len(targets):
            return
        row = len(self._decode) + len(self._slots)
        self._prompt_logprobs.append(PromptLogprobRow(row, num_top, targets))
        self._prompt_logprob_rows.append((row, len(targets), request))


def _join(decode: IntArray, prefill: list[int] | list[bool]) -> npt.NDArray[np.int32]:
    return np.concatenate([decode, np.array(prefill, dtype=np.int32)])
