"""An image as bytes and a table: the same image to an engine as its patches in float32."""

import msgspec
import numpy as np
import pytest

from tests.fakes.tiny_vision import (
    PATCH_VALUES,
    Prompt,
    prompt_of,
    reference_greedy,
    save_vision_model,
    vision_reference,
)
from tests.unit.workers.engine.test_images import NUM_TOKENS, request_of, run
from workers import Engine
from workers.config import EngineConfig
from workers.engine.media import ImagePatches, MediaItem
from workers.engine.pixels import NUM_LEVELS, ImagePixels
from workers.errors import RequestRejectedError

COLOURS, FRAMES = 3, 2


def pixels(seed: int, height: int, width: int, **changes) -> ImagePixels:
    rng = np.random.default_rng(seed)
    values = rng.integers(0, 256, height * width * PATCH_VALUES // FRAMES, dtype=np.uint8)
    levels = np.linspace(-2, 2, COLOURS * NUM_LEVELS, dtype="<f4")
    item = ImagePixels(
        bytes([seed]) * 16, height, width, FRAMES, levels.tobytes(), values.tobytes()
    )
    return msgspec.structs.replace(item, **changes)


def as_patches(item: ImagePixels) -> ImagePatches:
    """Written out value by value."""
    levels = np.frombuffer(item.levels, "<f4").reshape(COLOURS, NUM_LEVELS)
    area = PATCH_VALUES // FRAMES // COLOURS
    rows = []
    for patch in range(item.num_patches):
        row = []
        for colour in range(COLOURS):
            start = (patch * COLOURS + colour) * area
            seen = [levels[colour, value] for value in item.values[start : start + area]]
            row += seen * FRAMES
        rows.append(row)
    return ImagePatches.of(item.digest, item.grid_height, item.grid_width, np.array(rows))


def test_patches_are_the_table_looked_up():
    item = pixels(1, 4, 6)
    assert np.array_equal(item.patches, as_patches(item).patches)


def test_pixels_survive_a_frame():
    item = pixels(1, 2, 2)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(item), type=MediaItem) == item


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_vision_model(tmp_path_factory.mktemp("qwen2_5_vl"))


@pytest.fixture
def engine(folder):
    engine = Engine.from_config(
        EngineConfig(model=str(folder), page_size=16, num_pages=64, num_cpu_threads=1)
    )
    yield engine
    engine.close()


def test_tokens_are_transformers(engine, folder):
    prompt = prompt_of(3, pixels(2, 4, 6), 4)
    patches = [as_patches(item) for item in prompt.images]
    expected = reference_greedy(
        vision_reference(folder), Prompt(prompt.ids, prompt.spans, patches), NUM_TOKENS
    )
    assert run(engine, prompt)[0] == [expected]
    assert engine.info.media.takes_pixels


REFUSED = {
    "values too few": ({"values": b"\0" * 10}, "have 2304 bytes, not 10"),
    "no table": ({"levels": b""}, "have -1 bytes"),
    "half a table": ({"levels": bytes(100)}, "have -1 bytes"),
    "five colours": ({"levels": bytes(5 * 4 * NUM_LEVELS)}, "have -1 bytes"),
    "no frames": ({"num_frames": 0}, "have -1 bytes"),
    "no numbers": (
        {"levels": np.full(COLOURS * NUM_LEVELS, np.nan, dtype="<f4").tobytes()},
        "finite",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_before_it_is_queued(engine, name):
    changes, reason = REFUSED[name]
    prompt = prompt_of(3, pixels(2, 4, 12), 4)
    broken = [msgspec.structs.replace(item, **changes) for item in prompt.images]
    with pytest.raises(RequestRejectedError, match=reason):
        engine.submit(request_of(Prompt(prompt.ids, prompt.spans, broken)))
    assert not engine.has_work
