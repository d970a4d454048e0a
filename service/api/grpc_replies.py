"""The handler's values as protobuf messages. Knows no server."""

from collections.abc import Sequence

from service.handler.collect import ChoiceResult
from service.handler.directory import ServedModel
from service.handler.events import ChoiceDelta, TokenLogprob, Usage
from service.handler.generation import GenerationInfo
from service.handler.task import task_of
from service.proto import inference_pb2 as pb

_FINISH_REASONS = {
    None: pb.FINISH_REASON_UNSPECIFIED,
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
    "tool_calls": pb.FINISH_REASON_TOOL_CALLS,
    "repetition": pb.FINISH_REASON_REPETITION,
}


def choice_chunk(
    info: GenerationInfo,
    delta: ChoiceDelta,
    usage_so_far: Usage | None,
    prompt_token_ids: list[int] | None,
) -> pb.GenerateChunk:
    """None leaves a field out. A delta is never large."""
    choice = choice_message(delta, delta.text)
    choice.token_ids.extend(delta.token_ids)
    choice.logprobs.extend(map(logprob_message, delta.logprobs or ()))
    return pb.GenerateChunk(
        id=info.request_id,
        model=info.model,
        created=info.created_s,
        choice=choice,
        usage_so_far=None if usage_so_far is None else usage_message(usage_so_far),
        prompt_token_ids=prompt_token_ids,
    )


def usage_chunk(info: GenerationInfo, usage: Usage) -> pb.GenerateChunk:
    return pb.GenerateChunk(
        id=info.request_id, model=info.model, created=info.created_s, usage=usage_message(usage)
    )


def score_message(info: GenerationInfo, scores: Sequence[float], usage: Usage) -> pb.ScoreResponse:
    """Of so many scores as there may be inputs, which is no large message."""
    return pb.ScoreResponse(
        id=info.request_id,
        model=info.model,
        created=info.created_s,
        scores=scores,
        usage=usage_message(usage),
    )


def usage_message(usage: Usage) -> pb.Usage:
    return pb.Usage(
        prompt_tokens=usage.num_prompt_tokens,
        completion_tokens=usage.num_output_tokens,
        total_tokens=usage.num_total_tokens,
        cached_tokens=usage.num_cached_tokens,
    )


def model_message(model: ServedModel) -> pb.Model:
    info = model.info
    if info is None:
        return pb.Model(name=model.name, ready=model.is_ready(), parent=model.parent or "")
    return pb.Model(
        name=model.name,
        max_context_tokens=info.max_request_len,
        vocab_size=info.vocab_size,
        dtype=info.dtype,
        ready=model.is_ready(),
        task=task_of(info),
        parent=model.parent or "",
    )


def choice_message(part: ChoiceResult | ChoiceDelta, text: str) -> pb.Choice:
    """Without what may be millions of values: see choice_chunk and service.api.grpc_bytes."""
    choice = pb.Choice(
        index=part.index,
        text=text,
        finish_reason=_FINISH_REASONS[part.finish_reason],
        reasoning=part.reasoning,
        tool_calls=[
            pb.ToolCall(index=call.index, id=call.id, name=call.name, arguments=call.arguments)
            for call in part.tool_calls
        ],
    )
    if isinstance(part.stop_reason, str):
        choice.stop_string = part.stop_reason
    elif part.stop_reason is not None:
        choice.stop_token_id = part.stop_reason
    return choice


def logprob_message(entry: TokenLogprob) -> pb.TokenLogprob:
    return pb.TokenLogprob(
        token_id=entry.token_id,
        token=entry.token,
        logprob=entry.logprob,
        rank=entry.rank,
        top=[
            pb.TopLogprob(token_id=top.token_id, token=top.token, logprob=top.logprob)
            for top in entry.top
        ],
        text_offset=entry.text_offset,
    )
