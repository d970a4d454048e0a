"""What a model is for, as its card, the page and the command line tell."""

from enum import StrEnum

from workers.engine.encoder_input import FeatureEncoder
from workers.engine.protocol import ModelInfo
from workers.pooling.params import Pooling


class Task(StrEnum):
    """EMBED: vectors of texts. SCORE: one score of a pair of texts. CLASSIFY: several scores of a
    text. TRANSCRIBE: texts of speech."""

    GENERATE = "generate"
    EMBED = "embed"
    SCORE = "score"
    CLASSIFY = "classify"
    TRANSCRIBE = "transcribe"


def task_of(info: ModelInfo) -> Task:
    if isinstance(info.encoder, FeatureEncoder):
        return Task.TRANSCRIBE
    own = info.embedding
    if own is None:
        return Task.GENERATE
    if own.pooling is Pooling.SCORES:
        return Task.SCORE if own.size == 1 else Task.CLASSIFY
    return Task.EMBED if info.is_encoder_only or own.is_purpose else Task.GENERATE
