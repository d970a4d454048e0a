"""The HTTP routes of responses that are stored: to see, to stop, to delete."""

from collections.abc import Iterator
from contextlib import contextmanager

from fastapi import FastAPI, Request
from starlette.responses import Response

from service.api.generation_routes import Place
from service.api.http_replies import EventStreamResponse, json_response, response_in_pieces
from service.api.middleware import context_of
from service.api.openai.wire import encode_json
from service.api.openapi import describe
from service.api.responses.conversation import not_found
from service.api.responses.draft import CANCELLED, with_output
from service.api.responses.live import FollowedStream, LiveResponses
from service.api.responses.pages import item_page
from service.api.responses.queries import (
    ITEMS_PARAMETERS,
    RETRIEVE_PARAMETERS,
    ItemsQuery,
    RetrieveQuery,
    read_query,
)
from service.api.responses.replay import ReplayedStream, shown_head
from service.api.responses.wire import DeletedResponse
from service.errors import ApiError, ApiErrorCode
from service.response_store.records import ResponseName, State, StoredResponse
from service.response_store.store import ResponseStore

_ID = "response_id"
STORED = f"/v1/responses/{{{_ID}}}"
_CANCEL_TIMEOUT_S = 4.0


def add_stored_routes(
    app: FastAPI, place: Place, store: ResponseStore, under_way: LiveResponses
) -> None:
    """under_way: those of the background that this process makes."""
    desk = _Desk(place, store)
    path = f"{place.prefix}{STORED}"
    parameters = (*place.parameters, _ID)

    @app.get(path, openapi_extra=describe(parameters, RETRIEVE_PARAMETERS))
    async def retrieve(request: Request) -> Response:
        query = read_query(request, RetrieveQuery)
        with desk.counting(request):
            stored = await desk.get(request)
        if not query.stream:
            return await _shown(stored)
        if not shown_head(stored).background:
            raise _conflict("only a response in the background can be streamed later")
        after = -1 if query.starting_after is None else query.starting_after
        name = desk.name(request)
        replayed = ReplayedStream(store, name, stored, after)
        stream = FollowedStream(under_way[name], after) if name in under_way else replayed
        events = stream.events()
        return EventStreamResponse(events, events.aclose)

    @app.delete(path, openapi_extra=describe(parameters))
    async def delete(request: Request) -> Response:
        with desk.counting(request):
            stored = await desk.get(request)
            if stored.state in (State.RUNNING, State.CANCELLING):
                raise _conflict("the response is under way: cancel it first")
            name = desk.name(request)
            await store.delete(name)
            return json_response(DeletedResponse(name.response_id))

    @app.post(f"{path}/cancel", openapi_extra=describe(parameters))
    async def cancel(request: Request) -> Response:
        with desk.counting(request):
            stored = await desk.get(request)
            if stored.state in (State.RUNNING, State.CANCELLING):
                name = desk.name(request)
                stopped = await store.cancel(name, _CANCEL_TIMEOUT_S)
                stored = stored if stopped is None else stopped
            elif shown_head(stored).status != CANCELLED:
                raise _conflict("the response has ended: there is nothing to cancel")
            return await _shown(stored)

    @app.get(f"{path}/input_items", openapi_extra=describe(parameters, ITEMS_PARAMETERS))
    async def input_items(request: Request) -> Response:
        query = read_query(request, ItemsQuery)
        with desk.counting(request):
            stored = await desk.get(request)
            return await response_in_pieces(item_page(stored.input, query))


class _Desk:
    """Stored responses as one place of the API lets a caller see them."""

    def __init__(self, place: Place, store: ResponseStore) -> None:
        self._place = place
        self._store = store

    @contextmanager
    def counting(self, request: Request) -> Iterator[None]:
        """Looking counts against the caller's requests, and costs no tokens. Raises ApiError."""
        models = self._place.models(request)
        with models.admitting(context_of(request.scope).caller) as lease:
            yield
            lease.end(0)

    def name(self, request: Request) -> ResponseName:
        return ResponseName(context_of(request.scope).caller.tenant, request.path_params[_ID])

    async def get(self, request: Request) -> StoredResponse:
        """Raises ApiError where there is none of the caller's and of the place's models."""
        name = self.name(request)
        stored = await self._store.get(name)
        names = {model.name for model in self._place.models(request).every()}
        if stored is None or stored.model not in names:
            raise not_found(name.response_id, _ID)
        return stored


async def _shown(stored: StoredResponse) -> Response:
    head = encode_json(shown_head(stored)) if stored.state is State.LOST else stored.head
    return await response_in_pieces(iter(with_output([head], [stored.output])))


def _conflict(message: str) -> ApiError:
    return ApiError(ApiErrorCode.INVALID_REQUEST, message, _ID)
