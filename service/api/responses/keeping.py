"""Keeping: one response from its first delta to the store, whole or streamed."""

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from service.api.responses.draft import CANCELLED, Draft, make_key, output_json, with_output
from service.api.responses.input_json import input_json
from service.api.responses.items import Item
from service.api.responses.output import COMPLETED, IN_PROGRESS, INCOMPLETE, Output
from service.api.responses.requests import ResponsesRequest
from service.api.responses.wire import response_usage
from service.errors import ApiError, ApiErrorCode
from service.handler.events import Usage
from service.handler.generation import Generation
from service.response_store.records import BegunResponse, EndedResponse, ResponseName
from service.response_store.runs import Run, Runs

BEGIN_S = 1.0
"""How long a stream waits at most for the store to begin it: a call to an actor."""
_CUT_BY = {"length": "max_output_tokens", "repetition": "repetition"}
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ending:
    """How a response ended. cut: what has made it incomplete."""

    status: str
    usage: Usage
    failure: ApiError | None = None
    cut: str = ""


class Keeping:
    """items: the input, without what it follows and without references."""

    def __init__(
        self,
        runs: Runs,
        tenant: str,
        request: ResponsesRequest,
        items: Sequence[Item],
        generation: Generation,
    ) -> None:
        self._runs = runs
        self._items = items
        self._key = make_key()
        self._is_prepared = False
        self._previous_id = request.previous_response_id or ""
        self._beginning: asyncio.Task[None] | None = None
        self.output = Output(self._key)
        self.draft = Draft(request, self._key, generation)
        self.name = ResponseName(tenant, self.draft.id)

    async def prepare(self) -> None:
        """Before JSON of the draft is asked for."""
        if not self._is_prepared:
            await _in_turns(self.draft.prepare())
            self._is_prepared = True

    async def begin(self) -> Run:
        """Let others see that it is under way, and stop it; until_begun() waits for that. To be
        ended."""
        await self.prepare()
        run = self._runs.add(self.name)
        if self.draft.head.store:
            head = b"".join(self.draft.head_json())
            model, runner = self.draft.head.model, self._runs.runner
            begun = BegunResponse(self.name, model, head, runner)
            self._beginning = asyncio.create_task(self._runs.store.begin(begun))
        return run

    async def until_begun(self) -> None:
        """Until others see it, at any ingress: who is told its id may look it up at once. Not for
        longer than a moment, or a store that does not answer would hold every stream: where it
        cannot be reached nobody will see it, and end() says so."""
        if self._beginning is not None:
            await asyncio.wait({self._beginning}, timeout=BEGIN_S)

    async def begin_in_background(self) -> Run:
        """As begin(), of a response that nobody waits for. Raises ApiError where it cannot be kept,
        since nobody would ever see it."""
        await self.prepare()
        if sum(map(len, self.draft.head_json())) > self._runs.max_response_bytes:
            raise self._too_large()
        run = await self.begin()
        try:
            if self._beginning is not None:
                await self._beginning
        except BaseException:
            self._runs.remove(self.name)
            raise
        return run

    def _too_large(self) -> ApiError:
        message = f"a stored response may have at most {self._runs.max_response_bytes} bytes"
        return ApiError(ApiErrorCode.LIMIT_EXCEEDED, message)

    def ending(self, usage: Usage, *, is_cancelled: bool) -> Ending:
        """Of a response that has not failed."""
        if is_cancelled:
            return Ending(CANCELLED, usage)
        cut = _CUT_BY.get(self.output.finish_reason or "", "")
        return Ending(INCOMPLETE if cut else COMPLETED, usage, cut=cut)

    async def end(self, ending: Ending) -> list[bytes]:
        """Keep the response where it is to be kept; returns its JSON, which says whether it is."""
        await self.prepare()
        self._runs.remove(self.name)
        status = COMPLETED if ending.status == COMPLETED else INCOMPLETE
        for item in self.output.items:
            if not item.item_json:
                await _in_turns(item.seal(status if item.status == IN_PROGRESS else item.status))
        usage = response_usage(ending.usage, self.output.num_reasoning_tokens)
        self.draft.end(ending.status, int(time.time()), usage, ending.failure, ending.cut)
        if self.draft.head.store:
            self.draft.head.store = await self._store()
        return self.draft.json(self.output.items)

    async def _store(self) -> bool:
        asked: list[bytes] = []
        for piece in input_json(self._items, self._key):
            asked.append(piece)
            await asyncio.sleep(0)
        head, output = self.draft.head_json(), output_json(self.output.items)
        try:
            if self._beginning is not None:
                await self._beginning
            if sum(map(len, (*head, *asked, *output))) > self._runs.max_response_bytes:
                if not self.draft.head.background:
                    await self._runs.store.delete(self.name)
                    return False
                self.draft.fail(self._too_large())
                head, asked, output = self.draft.head_json(), [b"[]"], [b"[]"]
            model = self.draft.head.model
            ended = EndedResponse(
                self.name,
                model,
                b"".join(head),
                b"".join(asked),
                b"".join(output),
                self._previous_id,
            )
            return await self._runs.store.end(ended)
        except ApiError as error:
            _log.warning("a response is not kept: %s", error)
            return False


def begun_json(draft: Draft) -> list[bytes]:
    """Of a response that has no output yet."""
    return with_output(draft.head_json(), [b"[]"])


async def _in_turns(steps: Iterator[object]) -> None:
    for _ in steps:
        await asyncio.sleep(0)
