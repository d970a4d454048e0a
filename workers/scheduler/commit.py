"""Takes the result of a step in: tokens, log probabilities, and who is finished.

Knows nothing of how the step was put together; rows of requests that ended meanwhile are dropped.
"""

from collections.abc import Callable

from workers.errors import ErrorCode
from workers.protocol import FinishReason, OutputError, StepOutput, TokenLogprobs
from workers.scheduler.ledger import Ledger
from workers.scheduler.output_forecast import OutputForecast
from workers.scheduler.plan import NAN_TOKEN, StepResult
from workers.scheduler.plan_draft import StepRecord
from workers.scheduler.request import Request
from workers.scheduler.request_memory import RequestMemory


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

    def commit(self, record: StepRecord, result: StepResult) -> list[StepOutput]:
        """Raises ValueError when the result does not fit the step."""
        logprobs = _checked_logprobs(record, result)
        self._collect_prompt_logprobs(record, result)
        outputs = []
        for request, token_id, entry in zip(
            record.sampling, result.token_ids.tolist(), logprobs, strict=True
        ):
            if request.is_ended:
                continue
            is_nan = token_id == NAN_TOKEN
            outputs.append(
                self._fail(request) if is_nan else self._accept(request, token_id, entry)
            )
        for request in record.completed_prefills:
            if not request.is_ended:
                self._memory.share_prefix(request)
        self._ledger.counters.num_steps += 1
        self._ledger.counters.num_output_tokens += len(outputs)
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

    def _fail(self, request: Request) -> StepOutput:
        """End a request whose logits held a NaN; its pages are not offered to anybody."""
        self._memory.discard(request)
        self._ledger.end(request)
        error = OutputError(ErrorCode.INTERNAL, "the model produced no number for the next token")
        return StepOutput(request.request_id, [], FinishReason.ERROR, error=error)

    def _add_first_fields(self, request: Request, output: StepOutput) -> None:
        now_s = self._clock()
        started_s = now_s if request.first_scheduled_s is None else request.first_scheduled_s
        output.num_cached_tokens = request.num_cached_tokens
        output.queue_s = started_s - request.submitted_s
        output.prefill_s = now_s - started_s
        if request.sampling.prompt_logprobs is not None:
            output.prompt_logprobs = [None, *request.prompt_logprobs]
            request.prompt_logprobs = []

    def _collect_prompt_logprobs(self, record: StepRecord, result: StepResult) -> None:
        for row, num_targets, request in record.prompt_logprob_rows:
            entries = result.prompt_logprobs.get(row, ())
            if len(entries) != num_targets:
                raise ValueError(
                    f"step {record.step_id}: row {row} has {len(entries)} prompt log "
                    f"probabilities, {num_targets} were asked for"
                )
            if not request.is_ended:
                request.prompt_logprobs.extend(entries)


def _checked_logprobs(record: StepRecord, result: StepResult) -> tuple[TokenLogprobs | None, ...]:
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
