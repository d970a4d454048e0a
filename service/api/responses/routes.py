"""The HTTP routes of the Responses API. Parses, calls the model's handler, renders."""

from collections.abc import Iterator
from dataclasses import dataclass

from fastapi import FastAPI, Request
from starlette.responses import Response

from service.api.body import read_body
from service.api.generation_routes import Place, with_id
from service.api.http_replies import (
    EventStreamResponse,
    ended_by_failures,
    response_in_pieces,
    started,
    until_disconnect,
)
from service.api.middleware import context_of
from service.api.openapi import describe_body
from service.api.responses.background import collect_output, run_in_background
from service.api.responses.conversation import Conversations
from service.api.responses.keeping import Keeping
from service.api.responses.live import FollowedStream, LiveResponse, LiveResponses
from service.api.responses.requests import ResponsesRequest
from service.api.responses.stored_routes import add_stored_routes
from service.api.responses.stream import ResponseStream
from service.errors import params_named
from service.handler.generation import Generation
from service.limits import Limits
from service.response_store.runs import Run, Runs

RESPONSES = "/v1/responses"
_PARAMS = {
    "max_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
    "prompt": "input",
    "messages": "input",
}


@dataclass(frozen=True, slots=True)
class ResponseServices:
    """live: of the background, in this process. peek_s: see ApiServices."""

    limits: Limits
    runs: Runs
    live: LiveResponses
    peek_s: float


def add_response_routes(app: FastAPI, place: Place, services: ResponseServices) -> None:
    add_stored_routes(app, place, services.runs.store, services.live)
    limits = services.limits

    @app.post(
        f"{place.prefix}{RESPONSES}",
        name="responses",
        openapi_extra=describe_body(ResponsesRequest, place.parameters),
    )
    async def create(request: Request) -> Response:
        context = context_of(request.scope)
        models = place.models(request)
        models.check_admission()
        with models.admitting(context.caller) as lease:
            body = await read_body(request, ResponsesRequest, limits)
            conversations = Conversations(services.runs.store, context.caller.tenant, limits)
            items = await conversations.resolved(body.items)
            before = await conversations.before(body)
            with params_named(_PARAMS):
                neutral = body.to_generation_request([*before, *items], limits)
                neutral = with_id(neutral, context.record.request_id)
                handler = models.pick(neutral.model, context.record)
                generation = await started(request, handler.start(neutral, context, lease))
        async with ended_by_failures(generation):
            keeping = Keeping(services.runs, context.caller.tenant, body, items, generation)
            if body.background:
                live = await _put_behind(generation, keeping, services)
            elif body.stream:
                return await _streamed(generation, keeping, services.peek_s)
            else:
                return await _whole(request, generation, keeping)
        # Its client may leave: nothing of what follows ends the generation.
        if body.stream:
            events = FollowedStream(live).events()
            return EventStreamResponse(events, events.aclose)
        return await response_in_pieces(iter(live.begun))


async def _put_behind(
    generation: Generation, keeping: Keeping, services: ResponseServices
) -> LiveResponse:
    """Let it go on without its client. Raises ApiError where it cannot be kept."""
    run = await keeping.begin_in_background()
    live = services.live[keeping.name] = LiveResponse(keeping)

    async def go_on() -> None:
        try:
            await run_in_background(generation, keeping, run, live)
        finally:
            del services.live[keeping.name]

    services.runs.hold(go_on())
    return live


async def _streamed(generation: Generation, keeping: Keeping, peek_s: float) -> Response:
    """Raises ApiError where the generation fails at once."""
    stream = ResponseStream(generation, keeping)
    try:
        await stream.peek(peek_s)
    except BaseException:
        await stream.aclose()
        raise
    return EventStreamResponse(stream.response_events(), stream.aclose)


async def _whole(request: Request, generation: Generation, keeping: Keeping) -> Response:
    """Raises ApiError where the generation fails."""
    async with generation:
        await until_disconnect(request, collect_output(generation, keeping, Run(), _nobody_follows))
        ending = keeping.ending(generation.usage, is_cancelled=False)
        pieces = await until_disconnect(request, keeping.end(ending))
        return await until_disconnect(request, response_in_pieces(_taken(pieces)))


def _nobody_follows() -> None:
    pass


def _taken(pieces: list[bytes]) -> Iterator[bytes]:
    """Nobody has a piece any more once it is sent."""
    pieces.reverse()
    while pieces:
        yield pieces.pop()
