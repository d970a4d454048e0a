"""How a model's embeddings are pooled, by the file that sentence-transformers writes for it."""

import logging
from pathlib import Path
from typing import Any

from workers.errors import ModelLoadError
from workers.loading.sentence_modules import (
    POOLING_FOLDER,
    check_modules,
    read_json_object,
    read_prompt,
)
from workers.pooling.params import EmbeddingInfo, Pooling

POOLING_FILE = f"{POOLING_FOLDER}/config.json"

_PREFIX = "pooling_mode_"
# By pooling_mode, which newer folders have: those that are named otherwise by the older keys.
_OLDER_NAMES = {"cls": "cls_token", "max": "max_tokens", "mean": "mean_tokens"}
_METHODS = {"lasttoken": Pooling.LAST, "mean_tokens": Pooling.MEAN}

logger = logging.getLogger(__name__)


def pooling_modes(folder: Path) -> list[str] | None:
    """As sentence-transformers names those that are on; None where the folder says nothing. Raises
    ModelLoadError for a broken file."""
    path = folder / POOLING_FILE
    if not path.is_file():
        return None
    stated = read_json_object(path)
    newer = stated.get("pooling_mode")
    if newer is not None:
        named = newer if isinstance(newer, list) else [newer]
        return [_OLDER_NAMES.get(str(one), str(one)) for one in named]
    return [
        key.removeprefix(_PREFIX)
        for key, value in stated.items()
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
    """None where the model gives no embeddings, as with a warning where its folder asks for what is
    not applied. config: transformers' own; text: the part of it that describes the language
    model."""
    # OPT projects its final states to the size of its embeddings.
    size = getattr(text, "word_embed_proj_dim", None) or getattr(text, "hidden_size", None)
    pooling = read_pooling(folder)
    if pooling is None or not isinstance(size, int) or getattr(config, "is_encoder_decoder", False):
        return None
    try:
        check_modules(folder)
        prompt = read_prompt(folder)
    except ModelLoadError as error:
        logger.warning("no embeddings: %s", error)
        return None
    is_purpose = (folder / POOLING_FILE).is_file()
    return EmbeddingInfo(size, pooling, is_purpose=is_purpose, prompt=prompt)
