"""What a request may bring for its placeholders, and what is refused before anything is queued."""

import msgspec
import numpy as np
import pytest

from tests.fakes.tiny_vision import MERGE, PATCH_VALUES, PLACEHOLDER, image, prompt_of
from workers.engine.content import ContentSpan
from workers.engine.media import MAX_IMAGE_BYTES, ImageInfo, ImagePatches, MediaSpan
from workers.errors import ErrorCode, RequestRejectedError

INFO = ImageInfo(PLACEHOLDER, PATCH_VALUES, MERGE, max_tokens=10)
WIDE, DOT = image(1, 4, 10), image(2, 2, 2)


def spans_of(prompt, info=INFO, **changes):
    given = {"spans": prompt.spans, "items": prompt.images, **changes}
    return info.spans_of(given["spans"], given["items"], np.array(prompt.ids, dtype=np.int32))


def test_every_span_gets_what_stands_behind_it():
    prompt = prompt_of(2, DOT, 1, WIDE, DOT)
    assert spans_of(prompt) == (
        MediaSpan(3, 4, DOT),
        MediaSpan(7, 17, WIDE),
        MediaSpan(19, 20, DOT),
    )
    assert spans_of(prompt_of(4)) == ()


def test_text_alone_may_have_the_placeholder_too():
    assert spans_of(prompt_of(2, WIDE), spans=[], items=[]) == ()


def test_patches_travel_as_they_are():
    wire = msgspec.msgpack.encode([WIDE])
    (received,) = msgspec.msgpack.decode(wire, type=list[ImagePatches])
    assert received == WIDE
    patches = np.random.default_rng(1).standard_normal((40, PATCH_VALUES)).astype(np.float32)
    np.testing.assert_array_equal(received.patches, patches)


def changed(**fields):
    return msgspec.structs.replace(WIDE, **fields)


NAN = np.full((40, PATCH_VALUES), np.nan)
REFUSED = {
    "a placeholder too few": (
        {"spans": [ContentSpan(3, 9, WIDE.digest)]},
        "4 x 10 patches takes 10 placeholders, there are 9 from token 3 on",
    ),
    "no image": ({"items": []}, "no image is brought for the placeholders from token 3 on"),
    "an image too many": ({"items": [WIDE, DOT]}, "1 images are brought that no span shows"),
    "an image twice": ({"items": [WIDE, WIDE]}, "an image is brought once"),
    "no placeholder": ({"spans": [ContentSpan(2, 10, WIDE.digest)]}, "token 2 is no placeholder"),
    "bytes that are no patches": (
        {"items": [changed(values=WIDE.values[:-4])]},
        "4 x 10 patches of 96 values in float32 have 15360 bytes, not 15356",
    ),
    "another shape": (
        {"items": [changed(grid_height=2)]},
        "2 x 10 patches of 96 values in float32 have 7680 bytes, not 15360",
    ),
    "no whole squares": (
        {"items": [changed(grid_height=5, grid_width=8)]},
        "5 x 8 patches do not make squares of 2 x 2",
    ),
    "nothing": ({"items": [changed(grid_height=0)]}, "0 x 10 patches do not make squares"),
    "no numbers": (
        {"items": [ImagePatches.of(WIDE.digest, 4, 10, NAN)]},
        "patches must be finite numbers",
    ),
    "no digest": (
        {"items": [changed(digest=b"")], "spans": [ContentSpan(3, 10, b"")]},
        "a digest has 16 bytes, not 0",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_together_is_refused(name):
    changes, reason = REFUSED[name]
    prompt = prompt_of(2, WIDE, 2)
    with pytest.raises(RequestRejectedError, match=reason) as refused:
        spans_of(prompt, **changes)
    assert (refused.value.code, refused.value.param) == (ErrorCode.INVALID_REQUEST, "media")


def test_a_placeholder_beside_those_of_the_images_is_refused():
    prompt = prompt_of(2, WIDE, 2)
    ids = [*prompt.ids, PLACEHOLDER]
    with pytest.raises(RequestRejectedError, match="token 16 is a placeholder without an image"):
        INFO.spans_of(prompt.spans, prompt.images, np.array(ids, dtype=np.int32))


def test_an_image_must_fit_into_the_store_and_into_a_plan():
    small = msgspec.structs.replace(INFO, max_tokens=9)
    with pytest.raises(RequestRejectedError, match=r"takes 10 tokens, this engine holds 9 \(media"):
        spans_of(prompt_of(2, WIDE, 2), small)
    assert spans_of(prompt_of(2, DOT, 2), small)
    huge = msgspec.structs.replace(INFO, values_per_patch=MAX_IMAGE_BYTES // 16 + 1)
    dot = ImagePatches(DOT.digest, 2, 2, b"\0" * (MAX_IMAGE_BYTES + 16))
    with pytest.raises(RequestRejectedError, match="an image has at most 134217728 bytes"):
        spans_of(prompt_of(2, dot, 2), huge)
