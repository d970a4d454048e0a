"""A step for which the device has no memory runs in halves, down to a few tokens of one row.

The halves compute what the whole would have: a row's tokens are cut in order, so that later ones
find the keys and values of earlier ones in the pool. What does not fit even alone fails its row and
nobody else's. Deterministic mode cuts all steps into single tokens the same way. Knows plans and
results, no device.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np
import torch

from workers.engine.logprobs import NO_LOGPROBS, TokenLogprobs, join_logprobs
from workers.kv_cache.radix_node import EMPTY
from workers.pooling.params import Pooling
from workers.pooling.vectors import FloatArray
from workers.scheduler.encoder_plan import EncoderPlan
from workers.scheduler.plan import (
    NAN_TOKEN,
    IntArray,
    PooledRow,
    PromptLogprobRow,
    StepPlan,
    StepResult,
)
from workers.scheduler.state_moves import NO_RESTORES

MIN_PIECE_TOKENS = 64
"""Less of a row is not tried: what so few tokens lack will not be found by taking fewer."""

logger = logging.getLogger(__name__)


class ReadableStep(Protocol):
    """A launched step whose results are on their way to the host's memory."""

    def read(self) -> StepResult:
        """The results. The device must have passed the step."""


Launch = Callable[[StepPlan], ReadableStep]


def launch_in_pieces(
    plan: StepPlan, launch: Launch, free_memory: Callable[[], None]
) -> ReadableStep:
    """Launch the halves of a plan for which launch raised torch.OutOfMemoryError, one after the
    other, and of a half that does not fit either its halves.

    launch: must be repeatable until it returns. free_memory: gives back what is only cached.
    """
    free_memory()
    halves = split_plan(plan)
    if halves is None:
        logger.error("one row of step %d does not fit into the device's memory", plan.step_id)
        return _FailedRow(plan)
    logger.warning(
        "step %d of %d tokens in %d rows does not fit into the device's memory: it runs in halves",
        plan.step_id,
        plan.num_tokens,
        plan.batch_size,
    )
    is_one_row = plan.batch_size == 1
    first = _launch_half(halves[0], launch, free_memory)
    if is_one_row and isinstance(first, _FailedRow):
        return _FailedRow(plan)
    second = _launch_half(halves[1], launch, free_memory)
    return _JoinedStep(halves[0], first, second, is_one_row)


def _launch_half(plan: StepPlan, launch: Launch, free_memory: Callable[[], None]) -> ReadableStep:
    try:
        return launch(plan)
    except torch.OutOfMemoryError:
        # Not from here: the error's frames hold the step's tensors.
        pass
    return launch_in_pieces(plan, launch, free_memory)


def split_plan(plan: StepPlan) -> tuple[StepPlan, StepPlan] | None:
    """Two plans that do in turn what plan does; None for a row of at most MIN_PIECE_TOKENS.

    Rows are kept whole while there are several. What precedes a step precedes the first, but each
    row's encoder runs before its own first piece.
    """
    if plan.batch_size == 1 and plan.num_tokens <= MIN_PIECE_TOKENS:
        return None
    return _halves(plan)


def launch_by_tokens(plan: StepPlan, launch: Launch) -> ReadableStep:
    """Launch a plan as plans of one new token each, in order. It must have no runs."""
    if plan.num_tokens == 1:
        return launch(plan)
    first, second = _halves(plan)
    return _JoinedStep(
        first,
        launch_by_tokens(first, launch),
        launch_by_tokens(second, launch),
        plan.batch_size == 1,
    )


def _halves(plan: StepPlan) -> tuple[StepPlan, StepPlan]:
    """Of a plan of several tokens."""
    if plan.batch_size == 1:
        return _split_row(plan, plan.num_tokens // 2)
    ends = np.cumsum(plan.num_new_tokens)
    middle = int(np.searchsorted(ends, plan.num_tokens / 2)) + 1
    return _split_rows(plan, min(middle, plan.batch_size - 1))


def _split_rows(plan: StepPlan, num_rows: int) -> tuple[StepPlan, StepPlan]:
    num_tokens = int(plan.num_new_tokens[:num_rows].sum())
    first_wants = tuple(want for want in plan.prompt_logprobs if want.row < num_rows)
    second_wants = tuple(
        msgspec.structs.replace(want, row=want.row - num_rows)
        for want in plan.prompt_logprobs
        if want.row >= num_rows
    )
    pooled = _pooled_of(plan.pooled, 0, num_rows), _pooled_of(plan.pooled, num_rows)
    rows, tokens = _cut(num_rows), _cut(num_tokens)
    first, second = (
        msgspec.structs.replace(
            plan,
            is_decode=bool((plan.num_new_tokens[own] == 1).all()),
            slots=plan.slots[own],
            num_new_tokens=plan.num_new_tokens[own],
            prefix_lens=plan.prefix_lens[own],
            samples=plan.samples[own],
            input_ids=plan.input_ids[these],
            out_cache_loc=plan.out_cache_loc[these],
            bounded_cache_locs=tuple(locs[these] for locs in plan.bounded_cache_locs),
            prompt_logprobs=wants,
            pooled=of_half,
            encoder=plan.encoder.of_slots(plan.slots[own]),
            parents=plan.parents[these],
        )
        for own, these, wants, of_half in zip(
            rows, tokens, (first_wants, second_wants), pooled, strict=True
        )
    )
    return first, _without_prelude(second)


def _split_row(plan: StepPlan, num_tokens: int) -> tuple[StepPlan, StepPlan]:
    before, after = _cut(num_tokens)
    num_left = plan.num_tokens - num_tokens
    wants = plan.prompt_logprobs
    first = msgspec.structs.replace(
        plan,
        is_decode=num_tokens == 1,
        num_new_tokens=_int32(num_tokens),
        samples=_int32(0),
        input_ids=plan.input_ids[before],
        out_cache_loc=plan.out_cache_loc[before],
        bounded_cache_locs=tuple(locs[before] for locs in plan.bounded_cache_locs),
        prompt_logprobs=_wants_of(wants, before),
        pooled=tuple(row for row in plan.pooled if row.method is Pooling.MEAN),
    )
    second = msgspec.structs.replace(
        plan,
        encoder=EncoderPlan(),
        is_decode=num_left == 1,
        num_new_tokens=_int32(num_left),
        prefix_lens=plan.prefix_lens + np.int32(num_tokens),
        input_ids=plan.input_ids[after],
        out_cache_loc=plan.out_cache_loc[after],
        bounded_cache_locs=tuple(locs[after] for locs in plan.bounded_cache_locs),
        prompt_logprobs=_wants_of(wants, after),
    )
    return first, _without_prelude(second)


def _cut(position: int) -> tuple[slice, slice]:
    return slice(None, position), slice(position, None)


def _int32(value: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array([value], dtype=np.int32)


def _wants_of(wants: tuple[PromptLogprobRow, ...], tokens: slice) -> tuple[PromptLogprobRow, ...]:
    cut = (msgspec.structs.replace(want, target_ids=want.target_ids[tokens]) for want in wants)
    return tuple(want for want in cut if len(want.target_ids))


def _pooled_of(
    pooled: tuple[PooledRow, ...], first: int, stop: int | None = None
) -> tuple[PooledRow, ...]:
    """Those of rows first to stop, numbered from first on."""
    return tuple(
        msgspec.structs.replace(one, row=one.row - first)
        for one in pooled
        if one.row >= first and (stop is None or one.row < stop)
    )


def _without_prelude(plan: StepPlan) -> StepPlan:
    return msgspec.structs.replace(
        plan,
        admitted=(),
        table_writes=(),
        cleared=EMPTY,
        bounded_cleared=(),
        encoder=EncoderPlan(grants=plan.encoder.grants),
        state_restores=NO_RESTORES,
    )


@dataclass(frozen=True, slots=True)
class _FailedRow:
    """A plan of one row that there was no memory for."""

    plan: StepPlan

    def read(self) -> StepResult:
        is_sampling = bool(self.plan.samples[0])
        token_ids = np.full(int(is_sampling), NAN_TOKEN, dtype=np.int32)
        return StepResult(
            token_ids,
            chunk_has_nan=() if is_sampling else (True,),
            failed_rows=(0,),
            run_lens=_int32(1) if self.plan.has_runs else EMPTY,
            num_drafts=_int32(0) if self.plan.has_runs else EMPTY,
        )


@dataclass(frozen=True, slots=True)
class _JoinedStep:
    """Two halves of a step, first_plan being the first one's. is_one_row: they share their row."""

    first_plan: StepPlan
    first: ReadableStep
    second: ReadableStep
    is_one_row: bool

    def read(self) -> StepResult:
        first, second = self.first.read(), self.second.read()
        num_rows = 0 if self.is_one_row else self.first_plan.batch_size
        prompt = dict(first.prompt_logprobs)
        for row, entries in second.prompt_logprobs.items():
            earlier = prompt.get(row + num_rows, NO_LOGPROBS)
            prompt[row + num_rows] = join_logprobs([earlier, entries])
        failed = {*first.failed_rows, *(row + num_rows for row in second.failed_rows)}
        return StepResult(
            token_ids=np.concatenate([first.token_ids, second.token_ids]),
            logprobs=_joined_logprobs(first, second),
            prompt_logprobs=prompt,
            # Of one row the second half says what became of it.
            chunk_has_nan=(() if self.is_one_row else first.chunk_has_nan) + second.chunk_has_nan,
            pooled=_joined_pooled(first, second, num_rows),
            failed_rows=tuple(sorted(failed)),
            run_lens=_joined_run_lens(first, second),
            num_drafts=_joined_num_drafts(first, second),
        )


def _joined_pooled(
    first: StepResult, second: StepResult, num_rows: int
) -> tuple[tuple[int, FloatArray], ...]:
    """num_rows: of the first. Sums over both halves of a row that they share."""
    if not first.pooled and not second.pooled:
        return ()
    joined = dict(first.pooled)
    for half_row, vector in second.pooled:
        row = half_row + num_rows
        joined[row] = joined[row] + vector if row in joined else vector
    return tuple(joined.items())


def _joined_run_lens(first: StepResult, second: StepResult) -> IntArray:
    if not len(first.run_lens) and not len(second.run_lens):
        return EMPTY
    ones = (np.ones(len(half.token_ids), dtype=np.int32) for half in (first, second))
    own = (half.run_lens for half in (first, second))
    return np.concatenate([lens if len(lens) else one for lens, one in zip(own, ones, strict=True)])


def _joined_num_drafts(first: StepResult, second: StepResult) -> IntArray:
    """A half without runs has a token a sampling row, and no drafts."""
    halves = [
        half.num_drafts if len(half.run_lens) else np.zeros(len(half.token_ids), dtype=np.int32)
        for half in (first, second)
    ]
    return np.concatenate(halves) if len(first.run_lens) or len(second.run_lens) else EMPTY


def _joined_logprobs(first: StepResult, second: StepResult) -> tuple[TokenLogprobs | None, ...]:
    if not first.logprobs and not second.logprobs:
        return ()
    padded: list[TokenLogprobs | None] = []
    for half in (first, second):
        padded += half.logprobs or (None,) * len(half.token_ids)
    return tuple(padded)
