"""One stream to its reader, whatever its replicas say, and when."""

import pytest

from service.errors import ApiError, ApiErrorCode
from service.request_context import RequestContext
from service.routing.routed_stream import RoutedStream
from workers.engine.protocol import GenerateRequest, StepOutput
from workers.sampling.params import SamplingParams


class Owner:
    """Notes how often a stream has ended."""

    num_ended = 0

    def on_answer(self, stream):
        """Nobody else waits for it."""

    def on_end(self, stream, engine_s):
        self.num_ended += 1


def made():
    owner = Owner()
    request = GenerateRequest("r", [5], SamplingParams())
    return RoutedStream(request, RequestContext(), owner, 20_000), owner


@pytest.mark.asyncio
async def test_what_comes_after_the_end_is_nobodys():
    stream, owner = made()
    stream.deliver(StepOutput("r", [7]), None)
    stream.fail(ApiError(ApiErrorCode.DRAINING, "over"))
    for _ in range(2):
        stream.deliver(StepOutput("r", [8]), None)
    assert (await anext(stream)).token_ids == [7]
    with pytest.raises(ApiError, match="over"):
        await anext(stream)
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    assert owner.num_ended == 1


@pytest.mark.asyncio
async def test_a_request_that_cannot_be_sent_ends_with_an_error():
    stream, owner = made()
    stream.drop()
    stream.drop()
    with pytest.raises(ApiError, match="cannot be sent") as caught:
        await anext(stream)
    assert (caught.value.code, owner.num_ended) == (ApiErrorCode.INTERNAL, 1)


def test_every_attempt_has_an_id_of_its_own():
    stream, _ = made()
    ids = {"r", *(stream.next_attempt().request_id for _ in range(4))}
    assert len(ids) == 5
