"""Outputs of one request that piled up while its reader was busy, taken as one.

This is what keeps a slow ingress or client from slowing an engine down: the more steps it is
behind, the fewer chunks it has to make of them. Knows no streams.
"""

from collections import deque

from workers.engine.protocol import FinishReason, StepOutput

# What is made of one merged output is made in one go: a few milliseconds.
_MAX_TOKENS = 256
_FAILED = frozenset({FinishReason.ERROR, FinishReason.ABORT})


def take_merged(outputs: deque[StepOutput]) -> StepOutput:
    """Remove the first output and those that continue it; returns them as one.

    The first output's facts about the prompt and the last one's about the end are kept. An output
    that says that the request failed stays behind for the next call, so that the tokens before it
    are shown first.
    """
    first = outputs.popleft()
    if not outputs or not _continues(first, outputs[0]):
        return first
    token_ids = list(first.token_ids)
    logprobs = None if first.logprobs is None else list(first.logprobs)
    last = first
    while outputs and len(token_ids) < _MAX_TOKENS and _continues(last, outputs[0]):
        last = outputs.popleft()
        token_ids += last.token_ids
        if logprobs is not None:
            logprobs += last.logprobs or ()
    return StepOutput(
        first.request_id,
        token_ids,
        last.finish_reason,
        last.stop_token_id,
        first.num_cached_tokens,
        logprobs,
        first.prompt_logprobs,
        queue_s=first.queue_s,
        prefill_s=first.prefill_s,
    )


def _continues(before: StepOutput, after: StepOutput) -> bool:
    return (
        before.finish_reason is None
        and after.finish_reason not in _FAILED
        and after.prompt_logprobs is None
        and (before.logprobs is None) is (after.logprobs is None)
    )
