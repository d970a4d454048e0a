"""A step while it is put together: rows are added, then it becomes a StepPlan and a record of who
is in it. Decides nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from workers.kv_cache.radix_node import EMPTY, IntArray, RadixNode
from workers.scheduler.plan import (
    LAST_SAMPLED_TOKEN,
    AdmittedRequest,
    PooledRow,
    PromptLogprobRow,
    StepPlan,
    TableWrite,
)
from workers.scheduler.prefix_writes import prefix_writes
from workers.scheduler.request import ConstrainedRequest, PooledRequest, Request
from workers.scheduler.step_budget import PromptAllowance, TokenAllowance


@dataclass(slots=True)
class PendingCommit:
    """Who waits for the result of a plan that is not committed yet.

    rows: the request of every row. sampling: those of rows that yield tokens, in row order.
    num_drafts: how many drafts each of the first of them has, a few or none; the others have none.
    constrained: those of them with a grammar, and the position that each samples. has_repeats:
    whether rows of one request follow each other.
    completed_prefills: those of them whose prefill ends with this step. unfinished_prefills: the
    request of every other row and how many of its tokens are computed then, in row order.
    prompt_logprob_rows: row, number of target ids, request. Requests, not slots: a slot may have a
    new owner when the result comes. pooled_rows: row, request, and whether its prompt ends there;
    such a row is one of unfinished_prefills, too. void_rows: those of sampling whose tokens count
    for nothing, as they had no masks.
    """

    step_id: int
    rows: list[Request]
    sampling: list[Request]
    completed_prefills: list[Request]
    unfinished_prefills: list[tuple[Request, int]]
    prompt_logprob_rows: list[tuple[int, int, Request]]
    num_drafts: tuple[int, ...] = ()
    constrained: list[tuple[ConstrainedRequest, int]] = field(default_factory=list)
    pooled_rows: tuple[tuple[int, PooledRequest, bool], ...] = ()
    has_repeats: bool = False
    void_rows: set[int] = field(default_factory=set)

    @property
    def is_shared(self) -> bool:
        """Whether a row that waits for its mask keeps others waiting."""
        return len(self.rows) > 1


@dataclass(slots=True)
class DecodeDraft:
    """Rows that go on from the token that their slot sampled last; slots, prefix_lens and
    num_new_tokens int32 (n,), input_ids and, by account, out_cache_locs int32 (num tokens,).
    num_drafts: of each row, or empty where none has any. has_repeats: rows of one slot follow each
    other, forced tokens behind the one sampled last.
    """

    slots: IntArray
    prefix_lens: IntArray
    num_new_tokens: IntArray
    input_ids: IntArray
    out_cache_locs: tuple[IntArray, ...]
    requests: list[Request]
    num_drafts: tuple[int, ...] = ()
    has_repeats: bool = False

    def __len__(self) -> int:
        return len(self.slots)

    @classmethod
    def of_one_token_each(
        cls,
        slots: IntArray,
        prefix_lens: IntArray,
        out_cache_locs: tuple[IntArray, ...],
        requests: list[Request],
    ) -> "DecodeDraft":
        ones = np.ones(len(slots), dtype=np.int32)
        return cls(slots, prefix_lens, ones, ones * LAST_SAMPLED_TOKEN, out_cache_locs, requests)


MAX_HISTORY_IDS = 1 << 22
"""Token ids that penalties need of the requests of one plan, beyond which no more are admitted: 16
of the 256 MiB that a plan's frame may have. A single request's are always fewer."""

_NO_DECODE = DecodeDraft(EMPTY, EMPTY, EMPTY, EMPTY, (), [])


class PlanDraft:
    """budget: new tokens that may still be added. prompts: what else bounds those of prompts.

    sends_tokens: whether requests are admitted with all their tokens, for who proposes drafts.
    """

    def __init__(self, step_id: int, max_step_tokens: int, sends_tokens: bool) -> None:
        self.step_id = step_id
        self._sends_tokens = sends_tokens
        self.budget = max_step_tokens
        self.prompts: PromptAllowance = TokenAllowance()
        self._decode = _NO_DECODE
        self._prefilled: list[Request] = []
        self._slots: list[int] = []
        self._prefix_lens: list[int] = []
        self._samples: list[bool] = []
        self._input_ids: list[IntArray] = []
        self._out_cache_locs: list[tuple[IntArray, ...]] = []
        self._admitted: list[AdmittedRequest] = []
        self._num_history_ids = 0
        self._prefixes: list[tuple[int, RadixNode]] = []
        self._owes_chunk = False
        self._completed: list[Request] = []
        self._unfinished: list[tuple[Request, int]] = []
        self._constrained: list[tuple[ConstrainedRequest, int]] = []
        self._prompt_logprobs: list[PromptLogprobRow] = []
        self._prompt_logprob_rows: list[tuple[int, int, Request]] = []
        self._pooled_rows: tuple[tuple[int, PooledRequest, bool], ...] = ()

    @property
    def is_empty(self) -> bool:
        return not len(self._decode) and not self._slots

    @property
    def num_decode_rows(self) -> int:
        """Of a run, a row for each token."""
        return len(self._decode.input_ids)

    @property
    def num_decode_keys(self) -> int:
        """Keys that the decode rows read together, each its own token's included."""
        rows = self._decode
        return int(rows.prefix_lens @ rows.num_new_tokens.astype(np.int64)) + len(rows.input_ids)

    def room_for(self, num_prefix_tokens: int) -> int:
        """Most tokens of a chunk that follows so many tokens of its prompt."""
        room = min(self.budget, self.prompts.room_for(num_prefix_tokens))
        return max(1, room) if self._owes_chunk else room

    def set_decode_rows(self, rows: DecodeDraft) -> None:
        """Decode rows come first in a plan, and at once."""
        assert self.is_empty, "decode rows precede prefill rows"
        self._decode = rows
        self.budget -= len(rows.input_ids)

    def constrain(self, requests: Sequence[Request], positions: IntArray) -> None:
        """These have rows that sample in this step, tokens at these positions, int32 (n,); those of
        them with a grammar wait for masks."""
        self._constrained += [
            (one, position)
            for one, position in zip(requests, positions.tolist(), strict=True)
            if isinstance(one, ConstrainedRequest)
        ]

    @property
    def can_admit(self) -> bool:
        """Whether there is room for another request: a plan must stay small enough to send."""
        return self.room_for(0) > 0 and self._num_history_ids < MAX_HISTORY_IDS

    def admit(self, request: Request, prefix: RadixNode) -> None:
        """The request takes its slot with this step, on top of what the cache has down to prefix,
        which it has locked."""
        prompt_ids, output_ids = _penalised_ids(request)
        known_ids = request.known_tokens if self._sends_tokens else EMPTY
        self._num_history_ids += len(prompt_ids) + len(output_ids) + len(known_ids)
        self._admitted.append(
            AdmittedRequest(
                slot=request.slot,
                seed=request.seed,
                sampling=request.sampling,
                num_prompt_tokens=request.num_prompt_tokens,
                prompt_ids=prompt_ids,
                output_ids=output_ids,
                known_ids=known_ids,
                cache_salt=request.cache_salt if self._sends_tokens else "",
            )
        )
        self._prefixes.append((request.slot, prefix))

    def can_encode(self, num_tokens: int) -> bool:
        """Whether an encoder may compute so many tokens before the step. They count as a prompt's;
        but an encoder reads its input at once, so that the step's first may be of any length."""
        return num_tokens == 0 or not self._slots or num_tokens < self.room_for(0)

    def add_encoder(self, num_tokens: int) -> None:
        """For the request just admitted, whose first chunk gets a token at least: a request that
        has a slot has a row."""
        if num_tokens:
            self.add_media(num_tokens)
            self._owes_chunk = True

    def add_media(self, num_tokens: int) -> None:
        """Embeddings that are made before the step, for the chunk that is added next."""
        self.budget -= num_tokens
        self.prompts.spend(0, num_tokens)

    def add_chunk(self, request: Request, start: int, out_cache_locs: tuple[IntArray, ...]) -> None:
        """Tokens start .. start + n - 1 of a request that is being prefilled. out_cache_locs: int32
        (n,) by account."""
        num_tokens = len(out_cache_locs[0])
        stop = start + num_tokens
        is_last = stop == request.prefill_len
        yields_token = is_last and not request.is_pooled
        if request.wants_prompt_logprobs:
            self._add_prompt_logprobs(request, start, stop)
        if isinstance(request, PooledRequest) and (is_last or request.needs_whole_prompt):
            self._pooled_rows += ((self._next_row, request, is_last),)
        self._prefilled.append(request)
        self._slots.append(request.slot)
        self._prefix_lens.append(start)
        self._samples.append(yields_token)
        self._input_ids.append(request.buffer[start:stop])
        self._out_cache_locs.append(out_cache_locs)
        if yields_token:
            self.constrain((request,), np.array([stop], dtype=np.int32))
            self._completed.append(request)
        else:
            self._unfinished.append((request, stop))
        self.budget -= num_tokens
        self.prompts.spend(start, num_tokens)
        self._owes_chunk = False

    def build(
        self,
        table_writes: list[TableWrite],
        cleared: tuple[IntArray, ...],
    ) -> tuple[StepPlan, PendingCommit]:
        """table_writes: moves of running requests, carried out before this step. cleared: what
        requests that ended have left and nobody vouches for, by account."""
        record = PendingCommit(
            self.step_id,
            self._decode.requests + self._prefilled,
            self._decode.requests + self._completed,
            self._completed,
            self._unfinished,
            self._prompt_logprob_rows,
            self._decode.num_drafts,
            self._constrained,
            self._pooled_rows,
            self._decode.has_repeats,
        )
        if not self._slots:
            return self._decode_plan(table_writes, cleared), record
        lens = [len(ids) for ids in self._input_ids]
        locs = self._decode.out_cache_locs, *self._out_cache_locs
        by_account = [np.concatenate(parts) for parts in zip(*filter(None, locs), strict=True)]
        plan = StepPlan(
            step_id=self.step_id,
            is_decode=max(lens) == 1 and not self._decode.num_drafts,
            slots=_join(self._decode.slots, self._slots),
            num_new_tokens=_join(self._decode.num_new_tokens, lens),
            prefix_lens=_join(self._decode.prefix_lens, self._prefix_lens),
            samples=_join(self._decode.num_new_tokens, self._samples),
            input_ids=np.concatenate([self._decode.input_ids, *self._input_ids]),
            out_cache_loc=by_account[0],
            admitted=tuple(self._admitted),
            table_writes=(*table_writes, *prefix_writes(self._prefixes)),
            cleared=cleared[0],
            prompt_logprobs=tuple(self._prompt_logprobs),
            pooled=tuple(
                PooledRow(row, request.pooling.method) for row, request, _ in self._pooled_rows
            ),
            bounded_cache_locs=tuple(by_account[1:]),
            bounded_cleared=cleared[1:],
            masked_slots=self._masked_slots(),
        )
        return plan, record

    def _decode_plan(
        self,
        table_writes: list[TableWrite],
        cleared: tuple[IntArray, ...],
    ) -> StepPlan:
        rows = self._decode
        return StepPlan(
            step_id=self.step_id,
            is_decode=not rows.num_drafts,
            slots=rows.slots,
            num_new_tokens=rows.num_new_tokens,
            prefix_lens=rows.prefix_lens,
            samples=rows.num_new_tokens,
            input_ids=rows.input_ids,
            out_cache_loc=rows.out_cache_locs[0],
            table_writes=tuple(table_writes),
            cleared=cleared[0],
            bounded_cache_locs=rows.out_cache_locs[1:],
            bounded_cleared=cleared[1:],
            masked_slots=self._masked_slots(),
        )

    @property
    def _next_row(self) -> int:
        """Number of the row that is added next."""
        return len(self._decode) + len(self._slots)

    def _masked_slots(self) -> IntArray:
        if not self._constrained:
            return EMPTY
        return np.array([request.slot for request, _ in self._constrained], dtype=np.int32)

    def _add_prompt_logprobs(self, request: Request, start: int, stop: int) -> None:
        """Tokens start .. stop - 1 predict start + 1 .. stop, as far as these are the prompt's."""
        targets = request.buffer[start + 1 : min(stop + 1, request.num_prompt_tokens)]
        num_top = request.sampling.prompt_logprobs
        if num_top is None or not len(targets):
            return
        row = self._next_row
        self._prompt_logprobs.append(PromptLogprobRow(row, num_top, targets))
        self._prompt_logprob_rows.append((row, len(targets), request))


def _join(decode: IntArray, prefill: list[int] | list[bool]) -> npt.NDArray[np.int32]:
    return np.concatenate([decode, np.array(prefill, dtype=np.int32)])


def _penalised_ids(request: Request) -> tuple[IntArray, IntArray]:
    """The distinct prompt ids and the output ids that the request's sampling looks at, int32."""
    sampling, num_prompt = request.sampling, request.num_prompt_tokens
    if not sampling.depends_on_output:
        return EMPTY, EMPTY
    output_ids = request.known_tokens[num_prompt:]
    if sampling.repetition_penalty == 1.0:
        return EMPTY, output_ids
    occurs = np.bincount(request.known_tokens[:num_prompt])
    return np.flatnonzero(occurs).astype(np.int32), output_ids
