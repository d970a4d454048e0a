"""Requests with images between an ingress and its replicas."""

import asyncio

import msgspec
import numpy as np
import pytest

from service.images.files import ImageCeilings
from tests.fakes.loop_probe import MAX_UNITS, held_units
from tests.unit.service.routing.router.test_moved_streams import EXPECTED, NUM_TOKENS, kept
from tests.unit.service.routing.router.test_router import (
    anyone,
    collect,
    eventually,
    request,
    routed,
    tokens,
)
from workers.engine.content import ContentSpan
from workers.engine.pixels import NUM_LEVELS, ImagePixels
from workers.engine.protocol import GenerateRequest

pytestmark = pytest.mark.asyncio
LEVELS = np.zeros(3 * NUM_LEVELS, dtype="<f4").tobytes()


def with_image(num_bytes, name="r", **more):
    item = ImagePixels(b"d" * 16, 2, 2, 2, LEVELS, bytes(num_bytes))
    spans = [ContentSpan(1, 1, item.digest)]
    plain = request(name, prompt=(5, 9, 5), **more)
    return msgspec.structs.replace(plain, content_spans=spans, media=[item])


async def test_an_image_travels_again_with_a_stream_that_moves():
    with kept("a") as a, kept("b") as b:
        async with routed(a) as r:
            stream = await r.router.submit(with_image(1000, max_tokens=NUM_TOKENS), anyone())
            received = tokens([await anext(stream)])
            await r.router.update_replicas([a.address, b.address])
            await eventually(lambda: r.router.num_connected_replicas == 2)
            await asyncio.to_thread(a.kill)
            assert received + tokens(await collect(stream)) == EXPECTED
            (first,), (second,) = a.engine.requests, b.engine.requests
    assert second.media == first.media == with_image(1000).media
    assert second.content_spans == first.content_spans
    assert len(second.resumed_token_ids) >= len(received)


async def test_the_most_bytes_of_images_do_not_hold_the_loop():
    """Both ends are in this process, which holds its lock for what either copies."""
    most = with_image(3 * ImageCeilings().max_total_shown_pixels)
    with kept("a") as a:
        async with routed(a) as r:
            names = iter(map(str, range(100)))

            async def ask():
                named = msgspec.structs.replace(most, request_id=next(names))
                return await collect(await r.router.submit(named, anyone()))

            outputs, held = await held_units(ask)
    assert len(tokens(outputs)) == 8
    assert a.engine.requests[0].media == most.media
    assert held < MAX_UNITS


async def test_what_has_no_images_says_nothing_of_them():
    """So that an older engine takes it."""
    plain = msgspec.msgpack.decode(msgspec.msgpack.encode(request()))
    assert not {"media", "content_spans"} & plain.keys()
    shown = with_image(10)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(shown), type=GenerateRequest) == shown
