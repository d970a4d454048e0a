"""Models that are an encoder alone, on a GPU: what the CPU makes of each text alone."""

import numpy as np
import pytest

from tests.fakes.tiny_encoders import save_tiny_encoder
from tests.gpu.needs import NEEDS_GPU
from tests.proofs.served import serves
from tests.unit.workers.encoder_only.test_models import engine_of, random_texts, vectors_of
from workers.models.features import ENCODER, ModelFeature

pytestmark = NEEDS_GPU


@pytest.mark.parametrize("kind", ["body", "classifier"])
@pytest.mark.parametrize("model_type", ["bert", "roberta", "modernbert", "deberta-v2"])
@serves(ENCODER.subject, ModelFeature.GPU)
def test_vectors_and_scores_are_the_cpus(tmp_path, model_type, kind):
    save_tiny_encoder(model_type, tmp_path, kind)
    texts = random_texts()
    expected = vectors_of(engine_of(tmp_path, device="cpu"), texts)
    found = vectors_of(engine_of(tmp_path, device="cuda", dtype="float32"), texts)
    np.testing.assert_allclose(found, expected, atol=1e-3)
    half = vectors_of(engine_of(tmp_path, device="cuda", dtype="bfloat16"), texts)
    # A single score may be a small difference of large sums: the texts are taken together.
    assert np.linalg.norm(np.subtract(half, expected)) <= 0.1 * np.linalg.norm(expected)
