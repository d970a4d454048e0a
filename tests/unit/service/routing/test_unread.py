"""How much of a stream may pile up unread, by what it occupies."""

import pytest

from service.errors import ApiError, ApiErrorCode
from service.request_context import RequestContext
from service.routing.routed_stream import RoutedStream
from tests.fakes.logprobs import pack
from workers.engine.logprobs import TokenLogprobs
from workers.engine.protocol import GenerateRequest, StepOutput
from workers.sampling.params import SamplingParams

pytestmark = pytest.mark.asyncio
MAX_BYTES = 20_000


class Owner:
    """Of one stream; notes what becomes of it."""

    def __init__(self):
        self.num_aborted = self.num_ended = 0

    def abort(self, stream):
        self.num_aborted += 1

    def on_answer(self, stream):
        """Nobody else waits for it."""

    def on_end(self, stream, engine_s):
        self.num_ended += 1


def entry(num_top):
    return TokenLogprobs(-1.0, 1, list(range(num_top)), [-1.0] * num_top)


def made():
    owner = Owner()
    request = GenerateRequest("r", [5], SamplingParams())
    return RoutedStream(request, RequestContext(), owner, MAX_BYTES), owner


def num_taken(make_output):
    """How many of these outputs a stream keeps before it gives its reader up."""
    stream, owner = made()
    for number in range(1000):
        stream.deliver(make_output(), None)
        if stream.is_ended:
            assert (owner.num_aborted, owner.num_ended) == (1, 1)
            return number
    raise AssertionError("it keeps everything")


async def test_what_is_large_piles_up_less():
    plain = num_taken(lambda: StepOutput("r", [7]))
    several = num_taken(lambda: StepOutput("r", [7] * 20))
    chosen = num_taken(lambda: StepOutput("r", [7], logprobs=[entry(0)]))
    top = num_taken(lambda: StepOutput("r", [7], logprobs=[entry(20)]))
    assert plain == pytest.approx(150, abs=20)
    assert several == pytest.approx(24, abs=4)
    assert chosen == pytest.approx(98, abs=12)
    assert top == pytest.approx(12, abs=2)
    prompt = pack([entry(4)] * 20)
    assert num_taken(lambda: StepOutput("r", [7], prompt_logprobs=prompt)) == pytest.approx(
        20, abs=4
    )


async def test_one_output_of_any_size_is_taken_and_read():
    stream, owner = made()
    huge = StepOutput("r", [7], prompt_logprobs=pack([entry(20)] * 500))
    stream.deliver(huge, None)
    assert owner.num_aborted == 0
    assert await anext(stream) is huge
    stream.deliver(StepOutput("r", [8]), None)
    assert (await anext(stream)).token_ids == [8]


async def test_what_was_read_counts_no_more():
    stream, owner = made()
    for number in range(1000):
        stream.deliver(StepOutput("r", [number]), None)
        assert (await anext(stream)).token_ids == [number]
    assert (owner.num_aborted, owner.num_ended) == (0, 0)


async def test_whoever_reads_too_slowly_gets_what_there_is_and_then_the_error():
    stream, _ = made()
    while not stream.is_ended:
        stream.deliver(StepOutput("r", [7]), None)

    async def read():
        return [output async for output in stream]

    with pytest.raises(ApiError, match="reads too slowly") as caught:
        await read()
    assert caught.value.code is ApiErrorCode.TIMEOUT
