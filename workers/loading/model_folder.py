"""A model folder's small files: which folder it is, its config, its limits, its end tokens.

Nothing here reads weights or imports code from the folder.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PreTrainedConfig

from workers.builtin import builtin_draft_path, builtin_model_path
from workers.config import EngineConfig
from workers.errors import ConfigError, ModelLoadError
from workers.loading.config_checks import check_config, why_unreadable
from workers.loading.encoder_only import encoder_only_class, longest_text, read_text_info
from workers.loading.pooling_config import read_embedding_info
from workers.loading.quantization.read import read_recipe
from workers.pooling.params import EmbeddingInfo

TOKENIZER_FILE = "tokenizer.json"

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""By their names in EngineConfig.dtype."""

# What transformers raises for fields of wrong types or values, some by its classes of configs.
_CONFIG_ERRORS = (
    *(OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError),
    StrictDataclassError,
)

# Rope variants whose reach is the config's limit times their factor.
_STRETCHING_ROPES = ("linear", "dynamic", "yarn")

# What families call the longest context, the usual name first. Whisper's is of its decoder.
_CONTEXT_NAMES = (
    *("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length"),
    *("seq_length", "max_target_positions", "max_seq_length"),
)


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What can be known of a model without its weights.

    name: "builtin", "builtin-draft" or the folder's own name. max_context_len: the engine's limit,
    in tokens, prompt and output. eos_token_ids: ids that end a sequence, possibly none. embedding:
    what vectors it gives, None for none. is_encoder_only: it reads whole texts and generates none.
    """

    name: str
    folder: Path
    architecture: str
    vocab_size: int
    max_context_len: int
    eos_token_ids: tuple[int, ...]
    embedding: EmbeddingInfo | None
    is_encoder_only: bool = False


def resolve_model_folder(model: str) -> Path:
    """The folder of EngineConfig.model. Raises ModelLoadError if there is none."""
    builtin = {"builtin": builtin_model_path, "builtin-draft": builtin_draft_path}
    if model in builtin:
        try:
            return builtin[model]()
        except FileNotFoundError as error:
            raise ModelLoadError(str(error)) from error
    folder = Path(model).expanduser()
    if not folder.is_dir():
        raise ModelLoadError(
            f"{model!r} is neither {' nor '.join(builtin)} nor a folder with a model"
        )
    return folder


def read_hf_config(folder: Path) -> PreTrainedConfig:
    """config.json as transformers reads it, without what it says of quantisation.

    Raises ModelLoadError, also for sizes and values that no model has and for a recipe that is not
    known; never runs the folder's code.
    """
    if not (folder / "config.json").is_file():
        raise ModelLoadError(f"{folder} has no config.json")
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except _CONFIG_ERRORS as error:
        raise ModelLoadError(why_unreadable(folder / "config.json", error)) from error
    if not isinstance(config, PreTrainedConfig):
        raise ModelLoadError(f"{folder / 'config.json'} does not describe a model")
    for one in (config, getattr(config, "text_config", None)):
        if isinstance(one, PreTrainedConfig):
            check_config(folder / "config.json", one)
    _drop_recipe(folder, config)
    return config


def _drop_recipe(folder: Path, config: PreTrainedConfig) -> None:
    """Take quantization_config out, lest transformers acts on it: weight_recipe reads the file."""
    read_recipe(folder)
    for one in (config, getattr(config, "text_config", None)):
        if one is not None and getattr(one, "quantization_config", None) is not None:
            del one.quantization_config


def text_config_of(config: PreTrainedConfig) -> Any:
    """The part that describes the language model. Raises ModelLoadError if there are several."""
    try:
        return config.get_text_config()
    except ValueError as error:
        raise ModelLoadError(
            f"{config.model_type!r} is made of several models, no causal language model: {error}"
        ) from error


def dtype_on_gpu(config: PreTrainedConfig, asked: str) -> torch.dtype:
    """Of weights and activations. asked: EngineConfig.dtype; "auto" is the checkpoint's own."""
    if asked != "auto":
        return DTYPES[asked]
    stated = text_config_of(config).dtype
    return stated if isinstance(stated, torch.dtype) else torch.bfloat16


def architecture_of(config: PreTrainedConfig) -> str:
    """The first name in config.architectures. Raises ModelLoadError if there is none."""
    architectures = config.architectures or []
    if not architectures:
        raise ModelLoadError(
            f"config.json of model_type {config.model_type!r} names no architecture"
        )
    return str(architectures[0])


def read_eos_token_ids(folder: Path, config: PreTrainedConfig) -> tuple[int, ...]:
    """From generation_config.json, else from config.json; one id or a list in either."""
    path = folder / "generation_config.json"
    ids: Any = None
    if path.is_file():
        try:
            ids = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
        except (json.JSONDecodeError, AttributeError) as error:
            raise ModelLoadError(f"{path} is not a JSON object: {error}") from error
    if ids is None:
        ids = getattr(text_config_of(config), "eos_token_id", None)
    if ids is None:
        return ()
    return tuple(int(token_id) for token_id in (ids if isinstance(ids, list) else [ids]))


def _stated_context(config: Any) -> int | None:
    """Under whichever name the family has for it."""
    stated = (getattr(config, name, None) for name in _CONTEXT_NAMES)
    return next((tokens for tokens in stated if isinstance(tokens, int) and tokens > 0), None)


def _context_limits(config: Any, stated: int) -> tuple[int, int]:
    """(tokens by default, tokens at most) of a text config."""
    rope = getattr(config, "rope_parameters", None) or {}
    rope_type = rope.get("rope_type", "default")
    if rope_type not in _STRETCHING_ROPES:
        return stated, stated
    original = rope.get("original_max_position_embeddings") or stated
    reach = max(stated, int(original * float(rope.get("factor") or 1.0)))
    # Configs that stretch by yarn state the pretraining's limit; linear ones state either.
    return (reach if rope_type == "yarn" else stated), reach


def resolve_max_context_len(config: PreTrainedConfig, requested: int | None) -> int:
    """The engine's limit in tokens.

    Raises ConfigError when more is asked than the model can, and when neither says anything.
    """
    text_config = text_config_of(config)
    stated = _stated_context(text_config)
    if stated is None:
        if requested is None:
            raise ConfigError(
                f"config.json of {config.model_type!r} states no longest context; set "
                "max_context_len to what the model was trained for"
            )
        return requested
    default, limit = _context_limits(text_config, stated)
    if requested is None:
        return default
    if requested > limit:
        raise ConfigError(f"max_context_len={requested} exceeds the model's {limit} tokens")
    return requested


def _vocab_size(config: PreTrainedConfig) -> int:
    stated = getattr(text_config_of(config), "vocab_size", None)
    if not isinstance(stated, int):
        raise ModelLoadError(f"config.json of {config.model_type!r} states no vocab_size")
    return stated


def model_facts(config: EngineConfig) -> ModelFacts:
    """Facts of config.model without reading weights. Raises ModelLoadError or ConfigError."""
    folder = resolve_model_folder(config.model)
    hf_config = read_hf_config(folder)
    encoder_class = encoder_only_class(hf_config)
    if encoder_class is not None:
        return _encoder_facts(config, folder, hf_config, encoder_class)
    is_builtin = config.model in ("builtin", "builtin-draft")
    return ModelFacts(
        name=config.model if is_builtin else folder.resolve().name,
        folder=folder,
        architecture=architecture_of(hf_config),
        vocab_size=_vocab_size(hf_config),
        max_context_len=resolve_max_context_len(hf_config, config.max_context_len),
        eos_token_ids=read_eos_token_ids(folder, hf_config),
        embedding=read_embedding_info(folder, hf_config, text_config_of(hf_config)),
    )


def _encoder_facts(
    config: EngineConfig, folder: Path, hf_config: PreTrainedConfig, model_class: Any
) -> ModelFacts:
    return ModelFacts(
        name=folder.resolve().name,
        folder=folder,
        architecture=architecture_of(hf_config),
        vocab_size=_vocab_size(hf_config),
        max_context_len=longest_text(folder, hf_config, model_class, config.max_context_len),
        eos_token_ids=(),
        embedding=read_text_info(folder, hf_config, model_class),
        is_encoder_only=True,
    )
