"""Prepared images against transformers' own processor, value for value."""

import numpy as np
import pytest
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from service.images.errors import ImageRefusedError
from service.images.preparation import Preparation
from tests.fakes.pictures import picture
from workers.errors import ModelLoadError

CONFIGS = {
    "Qwen2-VL's own": {"min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14},
    "by size": {"size": {"shortest_edge": 28 * 28 * 16, "longest_edge": 28 * 28 * 64}},
    "other statistics": {
        "image_mean": [0.5, 0.4, 0.3],
        "image_std": [0.5, 0.25, 0.125],
        "rescale_factor": 0.004,
    },
    "tiny": {
        "patch_size": 4,
        "merge_size": 2,
        "temporal_patch_size": 3,
        "min_pixels": 64,
        "max_pixels": 64 * 20,
    },
    "bilinear": {"resample": 2},
}
SIZES = [(28, 28), (1, 1), (640, 480), (300, 1000), (57, 113), (1999, 10), (42, 14)]
ANY = 1 << 40


def expected(config, image):
    made = Qwen2VLImageProcessorPil(**config)(images=image, return_tensors="np")
    return made["pixel_values"], made["image_grid_thw"].tolist()


def prepared(config, image, max_pixels=ANY):
    preparation = Preparation.of(config)
    return preparation.prepare(image, preparation.size_of(*image.size, max_pixels))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", CONFIGS)
def test_patches_are_transformers_bit_for_bit(name, size):
    image = picture(1, *size)
    patches, grids = expected(CONFIGS[name], image)
    ours = prepared(CONFIGS[name], image)
    assert [[1, ours.grid_height, ours.grid_width]] == grids
    assert np.array_equal(ours.patches, patches)
    assert ours.patches.dtype == np.float32


def test_a_ceiling_on_pixels_is_a_smaller_longest_edge():
    image = picture(2, 640, 480)
    config = {"patch_size": 14, "min_pixels": 3136, "max_pixels": 28 * 28 * 40}
    ours = prepared({**config, "max_pixels": 12845056}, image, max_pixels=28 * 28 * 40)
    assert np.array_equal(ours.patches, expected(config, image)[0])


def test_a_byte_a_value_is_an_eighth_of_what_the_model_is_given():
    ours = prepared({}, picture(3, 280, 280))
    assert 8 * len(ours.values) == ours.patches.nbytes


def test_digests_differ_with_content_shape_and_normalisation_and_with_nothing_else():
    square, wide = picture(4, 56, 56), Image.new("RGB", (112, 28), (1, 2, 3))
    tall = Image.new("RGB", (28, 112), (1, 2, 3))
    other = square.copy()
    other.putpixel((0, 0), (255 - other.getpixel((0, 0))[0], 0, 0))
    images = [square, other, wide, tall]
    digests = {prepared({}, image).digest for image in images}
    digests.add(prepared({"image_mean": [0.5] * 3}, square).digest)
    assert len(digests) == 5
    assert prepared({}, square.copy()).digest in digests


def test_images_far_longer_than_wide_are_refused():
    with pytest.raises(ImageRefusedError, match="more than 200 times the other"):
        prepared({}, picture(5, 2010, 10))


@pytest.mark.parametrize(
    "config",
    [
        {"do_normalize": False},
        {"image_mean": [0.5, 0.5]},
        {"image_std": [0.0, 1.0, 1.0]},
        {"patch_size": 0},
        {"resample": 99},
        {"size": [1, 2]},
    ],
)
def test_what_is_not_done_here_is_said_when_a_folder_is_loaded(config):
    with pytest.raises(ModelLoadError, match="image processor cannot be used"):
        Preparation.of(config)
