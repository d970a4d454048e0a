"""How a model's embeddings are pooled, by the file that sentence-transformers writes for it."""

import json
import logging
from pathlib import Path
from typing import Any

from workers.errors import ModelLoadError
from workers.pooling.params import EmbeddingInfo, Pooling

POOLING_FILE = "1_Pooling/config.json"

_PREFIX = "pooling_mode_"
_METHODS = {"lasttoken": Pooling.LAST, "mean_tokens": Pooling.MEAN}

logger = logging.getLogger(__name__)


def read_json_object(path: Path) -> dict[str, Any]:
    """Empty where there is no such file. Raises ModelLoadError for one that is no JSON object."""
    if not path.is_file():
        return {}
    try:
        stated = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} is not JSON: {error}") from error
    if not isinstance(stated, dict):
        raise ModelLoadError(f"{path} is not a JSON object")
    return stated


def pooling_modes(folder: Path) -> list[str] | None:
    """As sentence-transformers names those that are on; None where the folder says nothing. Raises
    ModelLoadError for a broken file."""
    path = folder / POOLING_FILE
    if not path.is_file():
        return None
    return [
        key.removeprefix(_PREFIX)
        for key, value in read_json_object(path).items()
        if key.startswith(_PREFIX) and value is True
    ]


def read_pooling(folder: Path) -> Pooling | None:
    """LAST for a decoder whose folder says nothing: no other state has seen the whole prompt. None,
    and a warning, where it asks for what is not served. Raises ModelLoadError for a broken file."""
    modes = pooling_modes(folder)
    if modes is None:
        return Pooling.LAST
    if len(modes) == 1 and modes[0] in _METHODS:
        return _METHODS[modes[0]]
    logger.warning(
        "no embeddings: %s asks for pooling by %s; %s are served",
        folder / POOLING_FILE,
        " and ".join(modes) or "nothing",
        " and ".join(_METHODS),
    )
    return None


def read_embedding_info(folder: Path, config: Any, text: Any) -> EmbeddingInfo | None:
    """None where the model gives no embeddings. config: transformers' own; text: the part of it
    that describes the language model."""
    # OPT projects its final states to the size of its embeddings.
    size = getattr(text, "word_embed_proj_dim", None) or getattr(text, "hidden_size", None)
    pooling = read_pooling(folder)
    if pooling is None or not isinstance(size, int) or getattr(config, "is_encoder_decoder", False):
        return None
    return EmbeddingInfo(size, pooling, is_purpose=(folder / POOLING_FILE).is_file())
