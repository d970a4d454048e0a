"""Requests with images as large as the ceilings let them be: what reading and refusing them costs.

Judged as in test_loop_lag.py. Files are not decoded here: tokenizer processes do that.
"""

import json

import msgspec
import numpy as np
import pytest

from service.api.auth import OpenAuthenticator
from service.api.grpc import InferenceServicer
from service.api.grpc_calls import parse
from service.api.http import build_http_app
from service.api.services import ApiServices
from service.errors import ApiError
from service.limits import Limits
from service.proto import inference_pb2 as pb
from service.tokenizer.jobs import Seen, pack_token_ids
from tests.fakes.backend import MODEL_INFO
from tests.fakes.called import Called, UnconnectedCall
from tests.fakes.loop_probe import MAX_UNITS, held_units
from tests.fakes.text import make_bench
from workers.engine.content import ContentSpan
from workers.engine.media import ImageInfo
from workers.engine.pixels import NUM_LEVELS, ImagePixels

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(240)]
LIMITS = Limits()
MIB = 1 << 20
EYES = msgspec.structs.replace(
    MODEL_INFO, media=ImageInfo(5, 1176, 2, 10_000, takes_pixels=True), max_request_len=1 << 16
)
SEEN = Seen(
    pack_token_ids([5] * 5000),
    [ContentSpan(0, 5000, b"d" * 16)],
    [
        ImagePixels(
            b"d" * 16,
            100,
            200,
            2,
            np.zeros(3 * NUM_LEVELS, "<f4").tobytes(),
            bytes(3 * LIMITS.max_total_shown_pixels),
        )
    ],
)


@pytest.fixture
def bench(tmp_path, monkeypatch):
    made = make_bench(tmp_path, info=EYES)

    async def encode_images(job, flow):
        return SEEN

    monkeypatch.setattr(made.tokenizer, "encode_images", encode_images)
    return made


@pytest.fixture
def services(bench):
    return ApiServices(
        models=bench.models,
        authenticator=OpenAuthenticator(),
        is_ready=lambda: True,
        version="0",
        started_s=0,
    )


def image(num_chars):
    url = "data:image/png;base64," + "A" * num_chars
    return {"type": "image_url", "image_url": {"url": url}}


def chat(*parts, **more):
    body = {"messages": [{"role": "user", "content": list(parts)}], "max_tokens": 1, **more}
    return "/v1/chat/completions", body


def message(*blocks):
    body = {"messages": [{"role": "user", "content": list(blocks)}], "max_tokens": 1}
    return "/v1/messages", body


def block(num_chars):
    source = {"type": "base64", "media_type": "image/png", "data": "A" * num_chars}
    return {"type": "image", "source": source}


TAKEN = {
    "one image of the most bytes": lambda: chat(image(8 * MIB - 300)),
    "the most images of the most bytes": lambda: chat(*[image(8 * MIB // 16 - 200)] * 16),
    "the most choices": lambda: chat(image(8 * MIB - 300), n=LIMITS.max_n),
    "a block of the most bytes": lambda: message(block(8 * MIB - 300)),
    "the most blocks": lambda: message(*[block(8 * MIB // 16 - 200)] * 16),
}
REFUSED = {
    "many images": lambda: chat(*[image(2000)] * 255),
    "parts beyond the ceiling": lambda: chat(*[image(10)] * 4000),
    "urls without end": lambda: chat(*[{"type": "image_url", "image_url": {"url": "h" * MIB}}] * 7),
    "a url that is none": lambda: chat({"type": "image_url", "image_url": {"url": "data:" * MIB}}),
    "parameters of a type": lambda: chat(
        {"type": "image_url", "image_url": {"url": "data:" + "a;" * (3 * MIB)}}
    ),
    "images that are none": lambda: chat(*[{"type": "image_url", "image_url": {"a": 1}}] * 250),
    "blocks that are none": lambda: message(*[{"type": "image", "source": {"type": "x"}}] * 250),
}


def sent(path, body):
    data = json.dumps(body, separators=(",", ":")).encode()
    assert len(data) <= LIMITS.max_body_bytes
    return path, data


@pytest.mark.parametrize("name", TAKEN)
async def test_requests_at_the_ceilings_are_taken(services, bench, name):
    called, (path, data) = Called(build_http_app(services)), sent(*TAKEN[name]())
    (status, answer), held = await held_units(lambda: called.post(path, data))
    assert status == 200, answer[:300]
    assert bench.handler._image_room.num_bytes == 0
    assert held < MAX_UNITS


@pytest.mark.parametrize("name", REFUSED)
async def test_requests_beyond_the_ceilings_are_refused(services, name):
    called, (path, data) = Called(build_http_app(services)), sent(*REFUSED[name]())
    (status, answer), held = await held_units(lambda: called.post(path, data))
    assert status == 400, answer[:300]
    assert held < MAX_UNITS


def grpc_chat(*parts, repeated=1):
    """The parts again and again: read from their bytes, as a million take seconds to make."""
    content = pb.Message(parts=parts).SerializeToString() * repeated
    message = pb.Message.FromString(content)
    message.role = "user"
    chat = pb.Chat(messages=[message])
    request = pb.GenerateRequest(chat=chat, sampling=pb.SamplingParams(max_tokens=1))
    return request.SerializeToString()


def grpc_image(data):
    return pb.ContentPart(image=pb.Image(media_type="image/png", data=data))


GRPC_TAKEN = {
    "one image": lambda: grpc_chat(grpc_image(bytes(8 * MIB - 300))),
    "the most images": lambda: grpc_chat(*[grpc_image(bytes(8 * MIB // 16 - 200))] * 16),
}
GRPC_REFUSED = {
    "many images": lambda: grpc_chat(*[grpc_image(bytes(2000))] * 255),
    "many parts": lambda: grpc_chat(pb.ContentPart(text="x"), repeated=1 << 20),
    "empty parts": lambda: grpc_chat(pb.ContentPart(), repeated=3 * MIB),
}


@pytest.mark.parametrize("name", GRPC_TAKEN)
async def test_grpc_messages_at_the_ceilings_are_taken(bench, name):
    call = await _ask_grpc(bench, GRPC_TAKEN[name]())
    assert pb.GenerateResponse.FromString(call.answer).choices


@pytest.mark.parametrize("name", GRPC_REFUSED)
async def test_grpc_messages_beyond_the_ceilings_are_refused(bench, name):
    assert isinstance(await _ask_grpc(bench, GRPC_REFUSED[name]()), ApiError)


async def _ask_grpc(bench, data):
    """The answered call, or the refusal."""
    servicer = InferenceServicer(bench.models)

    async def ask():
        call = UnconnectedCall()
        try:
            request = await parse(pb.GenerateRequest, data, LIMITS.max_prompt_tokens)
            await servicer.generate(request, call)
        except ApiError as error:
            return error
        return call

    result, held = await held_units(ask)
    assert held < MAX_UNITS
    return result
