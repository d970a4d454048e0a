"""Prompts with images: placeholders, ceilings, and memory."""

import base64
import subprocess
import sys
from pathlib import Path

import pytest

from service.images.errors import ImageRefusedError
from service.images.files import ImageCeilings, ImageFile
from service.images.preparation import Preparation
from service.images.reader import ImageReader, TooManyTokensError, image_reader_of
from tests.fakes.pictures import picture, saved
from workers.errors import ModelLoadError

ROOT = Path(__file__).parents[4]
PLACEHOLDER = 9
SMALL, TALL = saved(picture(1, 56, 56)), saved(picture(2, 56, 112))


def reader(**ceilings):
    return ImageReader(Preparation.of({"min_pixels": 784}), PLACEHOLDER, ImageCeilings(**ceilings))


def show(token_ids, *files, max_tokens=None, **ceilings):
    shown = [file if isinstance(file, ImageFile) else ImageFile(file) for file in files]
    return reader(**ceilings).show(token_ids, shown, max_tokens)


def test_each_placeholder_becomes_as_many_as_its_image_needs():
    seen = show([1, PLACEHOLDER, 2, PLACEHOLDER, 3], SMALL, TALL)
    assert seen.token_ids == [1, *[PLACEHOLDER] * 4, 2, *[PLACEHOLDER] * 8, 3]
    assert [(span.start, span.num_tokens) for span in seen.spans] == [(1, 4), (6, 8)]
    assert [image.digest for image in seen.images] == [span.digest for span in seen.spans]
    assert [image.num_patches for image in seen.images] == [16, 32]


def test_an_image_shown_twice_is_brought_once():
    seen = show([PLACEHOLDER, PLACEHOLDER], SMALL, saved(picture(1, 56, 56), compress_level=1))
    assert len(seen.spans) == 2
    assert len(seen.images) == 1


def test_base64_is_read_strictly():
    text = base64.b64encode(SMALL).decode()
    assert show([PLACEHOLDER], ImageFile(base64=text)) == show([PLACEHOLDER], SMALL)
    for broken in (text[:-1] + "*", text + "\n", "!" + text, "A"):
        with pytest.raises(ImageRefusedError, match="not base64"):
            show([PLACEHOLDER], ImageFile(base64=broken))


@pytest.mark.parametrize("num_shown", [0, 2])
def test_a_template_that_shows_other_images_than_there_are_is_refused(num_shown):
    with pytest.raises(ImageRefusedError, match=f"shows {num_shown} of 1 images"):
        show([1, *[PLACEHOLDER] * num_shown], SMALL)


def test_low_detail_is_a_smaller_image():
    large = saved(picture(3, 560, 560))
    plain = show([PLACEHOLDER], large)
    low = show([PLACEHOLDER], ImageFile(large, max_pixels=280 * 280))
    assert (len(plain.token_ids), len(low.token_ids)) == (400, 100)


def test_larger_images_are_made_smaller_than_the_ceiling():
    seen = show([PLACEHOLDER], saved(picture(3, 560, 560)), max_shown_pixels=112 * 112)
    assert len(seen.token_ids) == 16


@pytest.mark.parametrize(
    ("ceilings", "reason"),
    [
        ({"max_pixels": 55 * 56}, "56 x 56 pixels, 3080 are allowed"),
        ({"max_total_pixels": 3 * 56 * 56 - 1}, "all images together have 9408 pixels"),
        ({"max_total_shown_pixels": 3 * 56 * 56 - 1}, "as the model sees them, have 9408 pixels"),
    ],
)
def test_ceilings_are_told_by_name(ceilings, reason):
    with pytest.raises(ImageRefusedError, match=reason):
        show([PLACEHOLDER, PLACEHOLDER], SMALL, TALL, **ceilings)


def test_prompts_that_become_too_long_are_refused_before_any_image_is_decoded(monkeypatch):
    monkeypatch.setattr("service.images.reader.decode", None)
    with pytest.raises(TooManyTokensError) as refused:
        show([1, PLACEHOLDER, PLACEHOLDER], SMALL, TALL, max_tokens=12)
    assert refused.value.num_tokens == 13


BOUNDED = """
import resource
from service.images.files import ImageCeilings
from tests.fakes.pictures import png_of_zeros
from tests.unit.service.images.test_reader import PLACEHOLDER, SMALL, show

ImageCeilings.memory_bytes = 16 << 20
before = resource.getrlimit(resource.RLIMIT_AS)
try:
    show([PLACEHOLDER], png_of_zeros(4096, 4096))
except MemoryError:
    assert resource.getrlimit(resource.RLIMIT_AS) == before
    show([PLACEHOLDER], SMALL)
    print("refused")
"""


def test_memory_is_bounded_and_the_bound_is_taken_back():
    """In a process that has no memory to spare already."""
    command = [sys.executable, "-c", BOUNDED]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout == "refused\n", done.stderr


def test_folders_without_eyes_or_without_a_word_on_them_have_no_reader(tmp_path):
    assert image_reader_of(tmp_path, ImageCeilings()) is None
    (tmp_path / "preprocessor_config.json").write_text('{"patch_size": 14}')
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert image_reader_of(tmp_path, ImageCeilings()) is None
    (tmp_path / "config.json").write_text('{"model_type": "qwen2_5_vl"}')
    with pytest.raises(ModelLoadError, match="image_token_id"):
        image_reader_of(tmp_path, ImageCeilings())
    (tmp_path / "config.json").write_text('{"model_type": "qwen2_5_vl", "image_token_id": 5}')
    found = image_reader_of(tmp_path, ImageCeilings())
    assert found is not None
    assert found.placeholder_id == 5


def test_the_form_of_a_folder_that_transformers_5_wrote_is_read(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen2_vl", "image_token_id": 9}')
    (tmp_path / "processor_config.json").write_text('{"processor_class": "Qwen2VLProcessor"}')
    assert image_reader_of(tmp_path, ImageCeilings()) is None
    combined = '{"image_processor": {"min_pixels": 784, "patch_size": 7}}'
    (tmp_path / "processor_config.json").write_text(combined)
    found = image_reader_of(tmp_path, ImageCeilings())
    assert found is not None
    assert found.show([PLACEHOLDER], [ImageFile(SMALL)], None).images[0].num_patches == 64
