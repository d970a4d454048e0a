"""Takes the result of a step in: tokens, log probabilities, and who is finished.

Knows nothing of how the step was put together; rows of requests that ended meanwhile are dropped.
"""

from collections.abc import Callable

from workers.engine.logprobs import NO_LOGPROBS, TokenLogprobs, join_logprobs
from workers.engine.protocol import FinishReason, OutputError, StepOutput
from workers.errors import ErrorCode
from workers.scheduler.ledger import Ledger
from workers.scheduler.output_forecast import OutputForecast
from workers.scheduler.plan import NAN_TOKEN, StepResult
from workers.scheduler.plan_draft import PendingCommit
from workers.scheduler.request import Request
from workers.scheduler.request_memory import RequestMemory

_NO_NUMBER = OutputError(ErrorCode.INTERNAL, "the model produced no number for the next token")
_OUT_OF_MEMORY = OutputError(
    ErrorCode.OUT_OF_MEMORY, "the engine ran out of memory for what this request asks"
)


class Committer:
    """Turns a StepResult into one StepOutput for every request that got a token."""

    def __init__(
        self,
        memory: RequestMemory,
        ledger: Ledger,
        forecast: OutputForecast,
        clock: Callable[[], float],
    ) -> None:
        self._memory = memory
        self._ledger = ledger
        self._forecast = forecast
        self._clock = clock

    def commit(self, record: PendingCommit, result: StepResult) -> list[StepOutput]:
        """Raises ValueError when the result does not fit the step."""
        logprobs = _checked_logprobs(record, result)
        self._collect_prompt_logprobs(record, result)
        failed = (record.rows[row] for row in result.failed_rows)
        outputs = [self._fail(one, _OUT_OF_MEMORY) for one in failed if not one.is_ended]
        _vouch_for_chunks(record, result)
        for request, token_id, entry in zip(
            record.sampling, result.token_ids.tolist(), logprobs, strict=True
        ):
            if request.is_ended:
                continue
            if token_id == NAN_TOKEN:
                outputs.append(self._fail(request, _NO_NUMBER))
            else:
                outputs.append(self._accept(request, token_id, entry))
        for request, num_computed in record.unfinished_prefills:
            if not request.is_ended:
                self._memory.pass_chunk(request, num_computed)
        for request in record.completed_prefills:
            if not request.is_ended:
                self._memory.share_prefix(request)
        self._ledger.counters.num_steps += 1
        self._ledger.counters.num_output_tokens += sum(len(one.token_ids) for one in outputs)
        return outputs

    def _accept(
        self, request: Request, token_id: int, logprobs: TokenLogprobs | None
    ) -> StepOutput:
        request.num_vouched_tokens = request.num_tokens
        request.append(token_id)
        output = StepOutput(request.request_id, [token_id])
        if request.num_output_tokens == 1:
            self._add_first_fields(request, output)
        if request.sampling.logprobs is not None:
            output.logprobs = [_required(logprobs, request)]
        reason = request.finish_reason_after(token_id)
        if reason is not None:
            output.finish_reason = reason
            output.stop_token_id = token_id if reason is FinishReason.STOP else None
            self._memory.release(request)
            self._ledger.end(request)
            max_tokens = request.max_total_len - request.num_prompt_tokens
            self._forecast.on_finish(request.num_output_tokens, max_tokens)
        return output

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


def _vouch_for_chunks(record: PendingCommit, result: StepResult) -> None:
    """A chunk's last state was computed from all tokens up to it. One that is no number ends
    nobody: only what later tokens make of it decides that."""
    if len(result.chunk_has_nan) != len(record.unfinished_prefills):
        raise ValueError(
            f"step {record.step_id} has {len(record.unfinished_prefills)} unfinished prefills, its "
            f"result tells of {len(result.chunk_has_nan)}"
        )
    for (request, num_tokens), has_nan in zip(
        record.unfinished_prefills, result.chunk_has_nan, strict=True
    ):
        if not has_nan and not request.is_ended:
            request.num_vouched_tokens = num_tokens


def _checked_logprobs(
    record: PendingCommit, result: StepResult
) -> tuple[TokenLogprobs | None, ...]:
    num_rows = len(record.sampling)
    logprobs = result.logprobs or (None,) * num_rows
    if len(result.token_ids) != num_rows or len(logprobs) != num_rows:
        raise ValueError(
            f"step {record.step_id} has {num_rows} sampling rows, its result has "
            f"{len(result.token_ids)} tokens and {len(logprobs)} log probabilities"
        )
    return logprobs


def _required(entry: TokenLogprobs | None, request: Request) -> TokenLogprobs:
    if entry is None:
        raise ValueError(f"request {request.request_id} asked for log probabilities, none came")
    return entry
