"""What a model is for, by the facts that engines tell of it."""

import pytest
from msgspec import structs

from service.handler.task import Task, task_of
from tests.fakes.backend import MODEL_INFO
from workers.engine.encoder_input import FeatureEncoder, TextEncoder
from workers.pooling.params import EmbeddingInfo, Pooling

ENCODER = {"is_encoder_only": True}


@pytest.mark.parametrize(
    ("facts", "task"),
    [
        ({"embedding": None}, Task.GENERATE),
        ({"embedding": EmbeddingInfo(4, Pooling.LAST)}, Task.GENERATE),
        ({"embedding": EmbeddingInfo(4, Pooling.LAST, is_purpose=True)}, Task.EMBED),
        ({"embedding": EmbeddingInfo(4, Pooling.CLS), **ENCODER}, Task.EMBED),
        ({"embedding": EmbeddingInfo(1, Pooling.SCORES), **ENCODER}, Task.SCORE),
        ({"embedding": EmbeddingInfo(3, Pooling.SCORES), **ENCODER}, Task.CLASSIFY),
        ({"embedding": None, "encoder": TextEncoder(9, 9)}, Task.GENERATE),
        ({"embedding": None, "encoder": FeatureEncoder(9, 9, 9)}, Task.TRANSCRIBE),
    ],
)
def test_the_facts_tell(facts, task) -> None:
    assert task_of(structs.replace(MODEL_INFO, **facts)) is task
