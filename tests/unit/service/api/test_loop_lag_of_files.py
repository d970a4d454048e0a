"""Hostile images, sounds and prompts by their whole way: how long they hold an ingress's loop.

Judged as in test_loop_lag.py, with tokenizer processes as they are, whose own time is not counted:
they have ceilings of time and memory (test_pool_images.py, test_audio.py).
"""

import base64
import json
import struct

import msgspec
import pytest
import pytest_asyncio

from service.api.auth import OpenAuthenticator
from service.api.http import build_http_app
from service.api.services import ApiServices
from service.tokenizer.pool import TokenizerPool, TokenizerPoolConfig
from tests.fakes.backend import MODEL_INFO
from tests.fakes.called import Called
from tests.fakes.loop_probe import MAX_UNITS, held_units
from tests.fakes.pictures import (
    jpeg_of_scans,
    picture,
    png_chunk,
    png_of_zeros,
    saved,
    webp_that_claims,
)
from tests.fakes.served_vision import save_vision_text
from tests.fakes.sounds import riff
from tests.fakes.text import InlineTokenizer, bench_over
from workers.engine.encoder_input import DecoderStart, FeatureEncoder
from workers.engine.media import ImageInfo

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(240),
]
MIB = 1 << 20
CHATS, SPEECH = "/v1/chat/completions", "/v1/audio/transcriptions"
BOUNDARY = "b"
BY_PROCESSES = ("encode_text", "encode_chat", "encode_images", "read_audio", "decode")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def called(tmp_path_factory):
    """A server whose model sees and hears. Its processes have no reader of sounds, which is not
    asked for here: files go to them and are refused."""
    folder = tmp_path_factory.mktemp("model")
    token = save_vision_text(folder, {"max_pixels": 2048 * 2048, "patch_size": 16})
    info = msgspec.structs.replace(
        MODEL_INFO,
        media=ImageInfo(token, 1536, 2, 10_000, takes_pixels=True),
        encoder=FeatureEncoder(50, 8, 100, DecoderStart((3,))),
        max_request_len=1 << 16,
    )
    pool = TokenizerPool(TokenizerPoolConfig(folder, timeout_s=120.0))
    await pool.start()
    tokenizer = InlineTokenizer(folder)
    for name in BY_PROCESSES:
        setattr(tokenizer, name, getattr(pool, name))
    services = ApiServices(
        models=bench_over(tokenizer, None, None, info).models,
        authenticator=OpenAuthenticator(),
        is_ready=lambda: True,
        version="0",
        started_s=0,
    )
    yield Called(build_http_app(services))
    await pool.aclose()


def part(data, media_type="image/png"):
    url = data if isinstance(data, str) else url_of(data, media_type)
    return {"type": "image_url", "image_url": {"url": url}}


def url_of(data, media_type="image/png"):
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def shown(*files):
    return [{"role": "user", "content": [part(file) for file in files]}]


def png_of_frames(num_frames):
    """An animated image whose frames are all of its size and come without their pixels."""
    honest = saved(picture(1, 64, 64))
    place = honest.index(b"IDAT") - 4
    frame = struct.pack(">IIIIIHHBB", 0, 64, 64, 0, 0, 1, 100, 0, 0)
    frames = png_chunk(b"acTL", struct.pack(">II", num_frames, 0))
    frames += png_chunk(b"fcTL", frame) * num_frames
    return honest[:place] + frames + honest[place:]


def gif_of_frames(num_frames):
    data = saved(picture(1, 512, 512).quantize(4), "GIF")
    start = data.index(b",")
    return data[:start] + data[start:-1] * num_frames + data[-1:]


def nested_url(depth):
    url = saved(picture(1, 8, 8))
    for _ in range(depth):
        url = url_of(url).encode()
    return url.decode()


IMAGES = {
    "a bomb": lambda: shown(png_of_zeros(30_000, 30_000)),
    "a bomb in one row": lambda: shown(png_of_zeros(1 << 25, 1)),
    "a size of exabytes": lambda: shown(webp_that_claims(1 << 24, 1 << 24)),
    "a large image cut short": lambda: shown(saved(picture(1, 2048, 2048))[:-MIB]),
    "an image of many scans": lambda: shown(jpeg_of_scans(10_000, 4096, 4096)),
    "as many images as go": lambda: shown(*[saved(picture(1, 256, 256))] * 16),
    "more images than go": lambda: shown(*[saved(picture(1, 8, 8))] * 4000),
    "an image of many frames": lambda: shown(gif_of_frames(400)),
    "frames without end": lambda: shown(png_of_frames(80_000)),
    "a sound": lambda: shown(url_of(riff(num_bytes=4 * MIB), "audio/wav")),
    "text for an image": lambda: shown(b"<svg>" * MIB),
    "a url in a url": lambda: shown(nested_url(12)),
    "no end of padding": lambda: shown("data:image/png;base64," + "=" * (7 * MIB)),
    "letters that are none": lambda: shown("data:image/png;base64," + "\u00e9" * (2 * MIB)),
    "the largest image": lambda: shown(saved(picture(1, 2048, 2048), "JPEG")),
}


@pytest.mark.parametrize("name", IMAGES)
async def test_images_do_not_hold_the_loop(called, name):
    body = {"messages": IMAGES[name](), "max_tokens": 1}
    data = json.dumps(body, ensure_ascii=False).encode()
    (status, answer), held = await held_units(lambda: called.post(CHATS, data))
    assert status in (200, 400), answer[:300]
    assert held < MAX_UNITS


def form(file, *more):
    parts = [
        f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()
        for name, value in (("model", "tiny"), *more)
    ]
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'
    return b"".join((*parts, head.encode(), file, f"\r\n--{BOUNDARY}--\r\n".encode()))


FORMS = {
    "a file that says less than it has": lambda: form(riff(told_bytes=0, num_bytes=7 * MIB)),
    "hours": lambda: form(riff(num_bytes=7 * MIB)),
    "line ends alone": lambda: form(b"\r\n" * (3 * MIB)),
    "all but a boundary": lambda: form((b"\r\n--" + b"a") * MIB),
    "dashes": lambda: form(b"\r\n--b-" * (MIB // 4)),
    "a form of many parts": lambda: form(b"", *[("language", "")] * 100_000),
    "a part of many headers": lambda: (
        f"--{BOUNDARY}\r\n".encode() + b"a: b\r\n" * MIB + b"\r\n" + form(b"")
    ),
    "a header without end": lambda: f"--{BOUNDARY}\r\n".encode() + b"a" * (7 * MIB),
    "a header of many words": lambda: (
        f"--{BOUNDARY}\r\nContent-Disposition: form-data".encode() + b'; a="b"' * (MIB // 2)
    ),
}


@pytest.mark.parametrize("name", FORMS)
async def test_forms_do_not_hold_the_loop(called, name):
    data, kind = FORMS[name](), f"multipart/form-data; boundary={BOUNDARY}"
    (status, answer), held = await held_units(lambda: called.post(SPEECH, data, kind))
    assert status in (200, 400), answer[:300]
    assert held < MAX_UNITS


def nested(depth):
    value = {"type": "object"}
    for _ in range(depth):
        value = {"type": "object", "properties": {"a": value}}
    return value


def tool(parameters):
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


def said(*turns, **more):
    return {"messages": [{"role": "user", "content": one} for one in turns], **more}


PROMPTS = {
    "a turn of the most text": lambda: said("{{ x }}" * (MIB // 2)),
    "more text than goes": lambda: said("{{ x }}" * MIB),
    "many turns": lambda: said(*["{% for %}"] * 10_000),
    "more turns than go": lambda: said(*["{% for %}"] * 100_000),
    "many parts": lambda: said([{"type": "text", "text": "a"}] * 10_000),
    "arguments of a template": lambda: said(
        "a", chat_template_kwargs={f"k{i}": "{{ x }}" for i in range(30_000)}
    ),
    "a deep argument": lambda: said("a", chat_template_kwargs={"x": nested(60)}),
    "a template of the client's": lambda: said(
        "a", chat_template="{% for i in range(10**9) %}{{ i }}{% endfor %}"
    ),
    "many tools": lambda: said("a", tools=[tool(nested(8))] * 1_000),
    "a deep tool": lambda: said("a", tools=[tool(nested(120))]),
}


@pytest.mark.parametrize("name", PROMPTS)
async def test_prompts_do_not_hold_the_loop(called, name):
    data = json.dumps({**PROMPTS[name](), "max_tokens": 1}, separators=(",", ":")).encode()
    (status, answer), held = await held_units(lambda: called.post(CHATS, data))
    assert status in (200, 400), answer[:300]
    assert held < MAX_UNITS
