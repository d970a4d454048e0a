"""A response that goes on without its client, until it ends, fails or is stopped."""

import asyncio
import logging
from collections.abc import Callable

from service.api.responses.draft import FAILED
from service.api.responses.keeping import Ending, Keeping
from service.api.responses.live import LiveResponse
from service.api.responses.output import COMPLETED
from service.errors import ApiError, ApiErrorCode
from service.handler.events import ChoiceDelta
from service.handler.generation import Generation
from service.response_store.runs import Run

_log = logging.getLogger(__name__)


async def run_in_background(
    generation: Generation, keeping: Keeping, run: Run, live: LiveResponse
) -> None:
    """Ends the generation and, in the store and for who follows it, the response."""
    try:
        await _run(generation, keeping, run, live)
    finally:
        live.close()


async def _run(generation: Generation, keeping: Keeping, run: Run, live: LiveResponse) -> None:
    try:
        async with generation:
            await collect_output(generation, keeping, run, live.tell)
            ending = keeping.ending(generation.usage, is_cancelled=run.is_cancelled)
    except ApiError as error:
        ending = Ending(FAILED, generation.usage, error)
    except asyncio.CancelledError:
        await live.end(keeping.ending(generation.usage, is_cancelled=True))
        raise
    except Exception as error:  # noqa: BLE001 - nobody else would see it
        _log.error("a response in the background failed", exc_info=error)
        bug = ApiError(ApiErrorCode.INTERNAL, "an internal error occurred")
        ending = Ending(FAILED, generation.usage, bug)
    await live.end(ending)


async def collect_output(
    generation: Generation, keeping: Keeping, run: Run, tell: Callable[[], None]
) -> None:
    """Until the generation ends or the run is stopped. Raises ApiError where it fails. tell: is
    called when there is more."""
    output, deltas = keeping.output, aiter(generation)

    async def next_delta() -> ChoiceDelta | None:
        return await anext(deltas, None)

    try:
        while (delta := await run.wait_for(next_delta)) is not None:
            for grown in output.push(delta):
                if grown.closed is not None:
                    for _ in grown.closed.seal(COMPLETED):
                        await asyncio.sleep(0)
            tell()
    finally:
        await deltas.aclose()
    if not run.is_cancelled:
        for _ in output.finish():
            pass
