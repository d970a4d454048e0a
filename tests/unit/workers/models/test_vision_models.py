"""Models with eyes: positions of three rows and embeddings in place of placeholders'."""

import pytest
import torch

from tests.fakes.dense_attention import DenseAttention
from tests.fakes.model_rows import make_batch
from tests.fakes.tiny_vision import (
    MERGE,
    PLACEHOLDER,
    VISION,
    image,
    prompt_of,
    reference_logits,
    save_vision_model,
    vision_reference,
)
from workers.config import EngineConfig
from workers.engine.media import ImageInfo
from workers.loading.loader import load_model
from workers.models.mrope import mrope_positions
from workers.models.token_inputs import PlacedEmbeddings, TokenInputs
from workers.parallel.group import SingleRank
from workers.scheduler.media_plan import PlacedMedia

WIDE, TALL, DOT = image(1, 4, 10), image(2, 12, 6), image(3, 2, 2)
PROMPTS = {
    "one image": prompt_of(5, WIDE, 7),
    "two of different sizes": prompt_of(3, TALL, 4, WIDE, 2),
    "an image at both ends": prompt_of(WIDE, 9, DOT),
    "one image twice": prompt_of(2, DOT, 2, DOT, 1),
}


def placed(prompt):
    grids = {one.digest: (one.grid_height, one.grid_width) for one in prompt.images}
    return [
        PlacedMedia(span.start, span.num_tokens, span.digest, *grids[span.digest])
        for span in prompt.spans
    ]


@pytest.fixture(scope="module", params=VISION)
def folder(request, tmp_path_factory):
    return save_vision_model(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def model(folder):
    config = EngineConfig(model=str(folder))
    return load_model(config, SingleRank(), torch.device("cpu"), torch.float32).model


@pytest.fixture(scope="module")
def reference(folder):
    return vision_reference(folder)


@pytest.mark.parametrize("name", PROMPTS)
def test_positions_are_transformers(reference, name):
    prompt = PROMPTS[name]
    ids = torch.tensor([prompt.ids])
    grids = torch.tensor([[1, one.grid_height, one.grid_width] for one in placed(prompt)])
    want, delta = reference.model.get_rope_index(ids, (ids == PLACEHOLDER).int(), grids)
    got = mrope_positions(placed(prompt), MERGE)
    n = len(prompt.ids)
    torch.testing.assert_close(torch.from_numpy(got.of_tokens(0, n)), want[:, 0])
    assert got.delta == delta.item()
    for start, stop in ((0, 6), (6, n), (4, 5), (n - 1, n), (n, n)):
        piece = torch.from_numpy(got.of_tokens(start, stop))
        torch.testing.assert_close(piece, want[:, 0, start:stop])
    assert got.of_tokens(n, n + 2).tolist() == [[n + got.delta, n + 1 + got.delta]] * 3


@pytest.mark.parametrize("name", PROMPTS)
def test_logits_of_every_position_are_transformers(model, reference, name):
    prompt = PROMPTS[name]
    batch = make_batch({0: prompt.ids}, {0: 0}, DenseAttention())
    by_digest = {one.digest: one for one in prompt.images}
    with torch.inference_mode():
        states = [model.media.encode(by_digest[span.digest]) for span in prompt.spans]
        tokens = TokenInputs(
            batch.input_ids,
            torch.from_numpy(model.media.positions(placed(prompt)).of_tokens(0, len(prompt.ids))),
            PlacedEmbeddings((batch.input_ids == PLACEHOLDER).nonzero()[:, 0], torch.cat(states)),
        )
        got = model.compute_logits(model(tokens, batch).hidden)
    torch.testing.assert_close(got, reference_logits(reference, prompt), rtol=0, atol=1e-4)


def test_what_a_model_takes_follows_from_its_config(model):
    assert model.media.info(64 * 4 * 100 + 1) == ImageInfo(
        PLACEHOLDER, 96, MERGE, 100, takes_pixels=True
    )
