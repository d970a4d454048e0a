"""Takes the result of a step in: tokens, log probabilities, and who is finished.

Knows nothing of how the step was put together; rows of requests that ended meanwhile are dropped.
"""

from collections.abc import Callable, Iterable

import numpy as np

from workers.engine.logprobs import NO_LOGPROBS, TokenLogprobs, join_logprobs
from workers.engine.protocol import FinishReason, OutputError, StepOutput
from workers.errors import ErrorCode
from workers.pooling.vectors import pack_vector
from workers.scheduler.ledger import Ledger
from workers.scheduler.output_forecast import OutputForecast
from workers.scheduler.plan import NAN_TOKEN, StepResult
from workers.scheduler.plan_draft import PendingCommit
from workers.scheduler.request import ConstrainedRequest, PooledRequest, Request
from workers.scheduler.request_memory import RequestMemory
from workers.scheduler.running_table import RunningTable
from workers.speculation.policy import DraftPolicy

Logprobs = tuple[TokenLogprobs | None, ...]

_NO_NUMBER = OutputError(ErrorCode.INTERNAL, "the model produced no number for the next token")
_NO_VECTOR = OutputError(ErrorCode.INTERNAL, "the model produced no number for the embedding")
_OUT_OF_MEMORY = OutputError(
    ErrorCode.OUT_OF_MEMORY, "the engine ran out of memory for what this request asks"
)


class Committer:
    """Turns a StepResult into one StepOutput for every request that got a token or its vector."""

    def __init__(
        self,
        table: RunningTable,
        memory: RequestMemory,
        ledger: Ledger,
        forecast: OutputForecast,
        clock: Callable[[], float],
        drafts: DraftPolicy,
    ) -> None:
        self._drafts = drafts
        self._table = table
        self._memory = memory
        self._ledger = ledger
        self._forecast = forecast
        self._clock = clock

    def commit(self, record: PendingCommit, result: StepResult) -> list[StepOutput]:
        """Raises ValueError when the result does not fit the step."""
        _check_runs(record, result)
        self._collect_prompt_logprobs(record, result)
        failed = (record.rows[row] for row in result.failed_rows)
        outputs = [self._fail(one, _OUT_OF_MEMORY) for one in failed if not one.is_ended]
        if record.unfinished_prefills or result.chunk_has_nan:
            _vouch_for_chunks(record, result, self._memory.lets_go_of_tokens)
        outputs += self._take_all(record, result)
        if record.pooled_rows:
            outputs += self._take_pooled(record, result)
        for request, num_computed in record.unfinished_prefills:
            if not request.is_ended:
                self._memory.pass_chunk(request, num_computed)
        for request in record.completed_prefills:
            if not request.is_ended:
                self._memory.share_prefix(request)
        self._ledger.counters.num_steps += 1
        self._ledger.counters.num_output_tokens += sum(map(len, [one.token_ids for one in outputs]))
        return outputs

    def _take(self, request: Request, token_id: int, logprobs: TokenLogprobs | None) -> StepOutput:
        if token_id == NAN_TOKEN or request.has_nan:
            return self._fail(request, _NO_NUMBER)
        request.num_vouched_tokens = request.num_tokens
        request.append(token_id)
        output = StepOutput(request.request_id, [token_id])
        if request.num_tokens == request.num_prompt_tokens + 1:
            self._add_first_fields(request, output)
        if request.sampling.logprobs is not None:
            output.logprobs = [_required(logprobs, request)]
        reason = request.finish_reason_after(token_id)
        if reason is not None:
            if reason is FinishReason.ERROR:
                return self._fail(request, _no_mask(request))
            output.finish_reason = reason
            if reason is FinishReason.STOP and token_id in request.stop_ids:
                output.stop_token_id = token_id
            self._memory.release(request)
            self._ledger.end(request)
            max_tokens = request.max_total_len - request.num_prompt_tokens
            self._forecast.on_finish(request.num_output_tokens, max_tokens)
        return output

    def _take_run(self, request: Request, token_ids: list[int], logprobs: Logprobs) -> StepOutput:
        """Up to the token that ends the request."""
        output = self._take(request, token_ids[0], logprobs[0])
        for token_id, entry in zip(token_ids[1:], logprobs[1:], strict=True):
            if output.finish_reason is not None:
                break
            output = _joined(output, self._take(request, token_id, entry))
        return output

    def _take_all(self, record: PendingCommit, result: StepResult) -> list[StepOutput]:
        token_ids, requests = result.token_ids.tolist(), record.sampling
        logprobs = _checked_logprobs(record, result)
        if not record.num_drafts:
            rows = zip(requests, token_ids, logprobs, strict=True)
            counted: Iterable[tuple[Request, int, TokenLogprobs | None]] = rows
            if record.void_rows:
                counted = (one for row, one in enumerate(rows) if row not in record.void_rows)
            outputs = [
                self._take(request, token_id, entry)
                for request, token_id, entry in counted
                if not request.is_ended
            ]
            return _joined_repeats(outputs) if record.has_repeats else outputs
        outputs, stop = [], 0
        for row, (request, run_len) in enumerate(
            zip(requests, result.run_lens.tolist(), strict=True)
        ):
            start, stop = stop, stop + run_len
            if not (request.is_ended or row in record.void_rows):
                outputs.append(self._take_run(request, token_ids[start:stop], logprobs[start:stop]))
        self._settle(record, result)
        return outputs

    def _take_pooled(self, record: PendingCommit, result: StepResult) -> list[StepOutput]:
        vectors, outputs = dict(result.pooled), []
        for row, request, is_last in record.pooled_rows:
            if request.is_ended:
                continue
            if row not in vectors:
                raise ValueError(f"step {record.step_id}: row {row} has no pooled vector")
            request.parts.add(vectors[row])
            if is_last:
                outputs.append(self._end_pooled(request))
        return outputs

    def _end_pooled(self, request: PooledRequest) -> StepOutput:
        vector = request.parts.finish(request.num_prompt_tokens)
        if vector is None:
            return self._fail(request, _NO_VECTOR)
        output = StepOutput(
            request.request_id, [], FinishReason.STOP, embedding=pack_vector(vector)
        )
        self._add_first_fields(request, output)
        self._memory.release(request)
        self._ledger.end(request)
        return output

    def _settle(self, record: PendingCommit, result: StepResult) -> None:
        """Tell the table which drafts were wrong, or not even made. Runs come first among the
        sampling rows."""
        counters = self._ledger.counters
        all_verified = result.num_drafts.tolist() or record.num_drafts
        for request, num_planned, num_verified, run_len in zip(
            record.sampling, record.num_drafts, all_verified, result.run_lens.tolist(), strict=False
        ):
            if num_planned:
                counters.add_run(num_verified, run_len - 1)
                self._drafts.observe_run(num_planned, run_len - 1)
            if not request.is_ended:
                self._table.settle(request.slot, num_planned + 1 - run_len)

    def _fail(self, request: Request, error: OutputError) -> StepOutput:
        """End a request whose keys and values are in doubt: its pages are offered to nobody."""
        self._memory.discard(request)
        self._ledger.end(request)
        return StepOutput(request.request_id, [], FinishReason.ERROR, error=error)

    def _add_first_fields(self, request: Request, output: StepOutput) -> None:
        now_s = self._clock()
        started_s = now_s if request.first_scheduled_s is None else request.first_scheduled_s
        output.num_cached_tokens = request.num_cached_tokens
        output.queue_s = started_s - request.submitted_s
        output.prefill_s = now_s - started_s
        if request.sampling.prompt_logprobs is not None:
            output.prompt_logprobs = join_logprobs(request.prompt_logprobs)
            request.prompt_logprobs = []

    def _collect_prompt_logprobs(self, record: PendingCommit, result: StepResult) -> None:
        for row, num_targets, request in record.prompt_logprob_rows:
            if row in result.failed_rows:
                continue
            entries = result.prompt_logprobs.get(row, NO_LOGPROBS)
            if len(entries) != num_targets:
                raise ValueError(
                    f"step {record.step_id}: row {row} has {len(entries)} prompt log "
                    f"probabilities, {num_targets} were asked for"
                )
            if not request.is_ended:
                request.prompt_logprobs.append(entries)


def _no_mask(request: Request) -> OutputError:
    reason = request.failure if isinstance(request, ConstrainedRequest) else "unknown"
    return OutputError(ErrorCode.INVALID_REQUEST, f"the grammar cannot be followed: {reason}")


def _vouch_for_chunks(record: PendingCommit, result: StepResult, lets_go_of_tokens: bool) -> None:
    """A chunk's last state was computed from all tokens up to it. One that is no number ends
    nobody: what later tokens make of it decides that. Where layers let go of tokens, later ones
    may not have seen it: nothing vouches for it any more."""
    if len(result.chunk_has_nan) != len(record.unfinished_prefills):
        raise ValueError(
            f"step {record.step_id} has {len(record.unfinished_prefills)} unfinished prefills, its "
            f"result tells of {len(result.chunk_has_nan)}"
        )
    for (request, num_tokens), has_nan in zip(
        record.unfinished_prefills, result.chunk_has_nan, strict=True
    ):
        request.has_nan |= has_nan and lets_go_of_tokens
        if not (has_nan or request.has_nan) and not request.is_ended:
            request.num_vouched_tokens = num_tokens


def _check_runs(record: PendingCommit, result: StepResult) -> None:
    if not _fits(record, result):
        raise ValueError(
            f"step {record.step_id} has {len(record.sampling)} sampling rows with "
            f"{sum(record.num_drafts)} drafts, its result has {len(result.token_ids)} tokens in "
            f"{len(result.run_lens)} runs"
        )


def _checked_logprobs(record: PendingCommit, result: StepResult) -> Logprobs:
    num_tokens = len(result.token_ids)
    logprobs = result.logprobs or (None,) * num_tokens
    if len(logprobs) != num_tokens:
        raise ValueError(
            f"step {record.step_id} has {num_tokens} tokens and {len(logprobs)} log probabilities"
        )
    return logprobs


def _fits(record: PendingCommit, result: StepResult) -> bool:
    """Every run has one token at least, and at most one more than it has drafts."""
    num_rows, run_lens = len(record.sampling), result.run_lens
    if not record.num_drafts:
        return len(result.token_ids) == num_rows and not len(run_lens)
    most = np.ones(num_rows, dtype=np.int32)
    most[: len(record.num_drafts)] += np.array(record.num_drafts, dtype=np.int32)
    return (
        len(run_lens) == num_rows
        and bool(((run_lens >= 1) & (run_lens <= most)).all())
        and len(result.token_ids) == int(run_lens.sum())
    )


def _joined(first: StepOutput, second: StepOutput) -> StepOutput:
    """Two outputs of one request, the second of which is not its first one."""
    second.token_ids = first.token_ids + second.token_ids
    if first.logprobs is not None:
        second.logprobs = first.logprobs + (second.logprobs or [])
    return second


def _joined_repeats(outputs: list[StepOutput]) -> list[StepOutput]:
    """One of each request: those of one follow each other."""
    joined: list[StepOutput] = []
    for output in outputs:
        if joined and joined[-1].request_id == output.request_id:
            joined[-1] = _joined(joined[-1], output)
        else:
            joined.append(output)
    return joined


def _required(entry: TokenLogprobs | None, request: Request) -> TokenLogprobs:
    if entry is None:
        raise ValueError(f"request {request.request_id} asked for log probabilities, none came")
    return entry
