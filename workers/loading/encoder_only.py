"""Folders of models that are an encoder alone: which they are, how long a text may be, and what is
made of its states. Reads small files only.
"""

import inspect
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from workers.config import EngineConfig
from workers.errors import ConfigError, ModelLoadError
from workers.loading.pooling_config import pooling_modes
from workers.loading.sentence_modules import (
    PROMPTS_FILE,
    SENTENCE_FILE,
    check_modules,
    read_json_object,
    read_prompt,
)
from workers.pooling.params import Activation, EmbeddingInfo, Pooling

_SUFFIXES = ("Model", "ForMaskedLM", "ForSequenceClassification")
_METHODS = {
    "cls_token": Pooling.CLS,
    "mean_tokens": Pooling.MEAN,
    "max_tokens": Pooling.MAX,
    "lasttoken": Pooling.LAST,
}
_ACTIVATIONS = {
    "Identity": Activation.NONE,
    "Sigmoid": Activation.SIGMOID,
    "Softmax": Activation.SOFTMAX,
    "Tanh": Activation.TANH,
}
_OWN_OFFSET = "create_position_ids_from_input_ids"


def encoder_only_class(config: PreTrainedConfig) -> Any:
    """transformers' class of what the first of config.architectures names, where that is an encoder
    alone; None otherwise. Of a masked language model: of the encoder in it.

    Encoders are those families that transformers has a masked language model of.
    """
    named = str((config.architectures or [""])[0])
    if not named.endswith(_SUFFIXES) or config.is_encoder_decoder:
        return None
    # Seconds of imports that decoders do without.
    import transformers
    from transformers.models.auto import modeling_auto as auto

    kind = config.model_type
    masked = auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES.get(kind)
    body = auto.MODEL_MAPPING_NAMES.get(kind)
    classifier = auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(kind)
    generates = named in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    if masked is None or generates or getattr(config, "is_decoder", False):
        return None
    if named == classifier:
        return getattr(transformers, named)
    return (
        getattr(transformers, body) if isinstance(body, str) and named in (body, masked) else None
    )


def check_encoder_settings(config: EngineConfig) -> None:
    """Raise ConfigError for what asks of an encoder what only decoders have."""
    asked = {
        "tp_size": config.tp_size > 1,
        "speculative": config.speculative is not None,
        "attention_backend": config.attention_backend is not None,
        "prefill_attention_backend": config.prefill_attention_backend is not None,
        "decode_attention_backend": config.decode_attention_backend is not None,
        "kv_cache_dtype": config.kv_cache_dtype != "auto",
        "page_size": config.page_size is not None,
        "num_pages": config.num_pages is not None,
        "model_impl": config.model_impl == "native",
    }
    for name, is_asked in asked.items():
        if is_asked:
            raise ConfigError(
                f"{name}={getattr(config, name)!r} is not for encoder-only models: they run on one "
                "rank through transformers' attention, and keep no keys and values"
            )


def is_classifier(model_class: Any) -> bool:
    return bool(model_class.__name__.endswith("ForSequenceClassification"))


def longest_text(folder: Path, config: Any, model_class: Any, requested: int | None) -> int:
    """In tokens: what the operator requests, else what sentence-transformers cuts texts to, else
    what the model has positions for. Raises ConfigError where there are not as many of these."""
    stated = getattr(config, "max_position_embeddings", None)
    if not isinstance(stated, int) or stated < 1:
        if requested is None:
            raise ConfigError(
                f"config.json of {config.model_type!r} states no longest text; set max_context_len"
            )
        return requested
    limit = stated - first_position(config, model_class)
    if requested is not None:
        if requested > limit:
            raise ConfigError(f"max_context_len={requested} exceeds the model's {limit} tokens")
        return requested
    cut = read_json_object(folder / SENTENCE_FILE).get("max_seq_length")
    return min(cut, limit) if isinstance(cut, int) and cut > 0 else limit


def first_position(config: Any, model_class: Any) -> int:
    """Of a text's first token: RoBERTa and its kin count on from their padding's id."""
    module = inspect.getmodule(model_class)
    holders = [module, *(each for _, each in inspect.getmembers(module, inspect.isclass))]
    counts_on = any(hasattr(each, _OWN_OFFSET) for each in holders)
    return (config.pad_token_id or 0) + 1 if counts_on else 0


def read_text_info(folder: Path, config: Any, model_class: Any) -> EmbeddingInfo:
    """Raises ModelLoadError where the folder asks for what is not served."""
    prompt = read_prompt(folder)
    if is_classifier(model_class):
        if prompt:
            raise ModelLoadError(
                f"{folder / PROMPTS_FILE} asks for a default prompt, which classifiers do not get"
            )
        return EmbeddingInfo(config.num_labels, Pooling.SCORES, _activation_of(config))
    check_modules(folder)
    return EmbeddingInfo(config.hidden_size, _pooling_of(folder), prompt=prompt)


def _pooling_of(folder: Path) -> Pooling:
    """The mean, as sentence-transformers has it, where the folder does not say."""
    modes = pooling_modes(folder)
    if modes is None:
        return Pooling.MEAN
    if len(modes) == 1 and modes[0] in _METHODS:
        return _METHODS[modes[0]]
    raise ModelLoadError(
        f"{folder} asks for pooling by {' and '.join(modes) or 'nothing'}; of encoders, one of "
        f"{', '.join(_METHODS)} is served"
    )


def _activation_of(config: Any) -> Activation:
    """As sentence-transformers writes it for a cross-encoder, else by the number of labels."""
    own = getattr(config, "sentence_transformers", None)
    named = own.get("activation_fn") if isinstance(own, dict) else None
    named = named or getattr(config, "sbert_ce_default_activation_function", None)
    if named is None:
        return Activation.SIGMOID if config.num_labels == 1 else Activation.SOFTMAX
    kind = str(named).rpartition(".")[2]
    if kind not in _ACTIVATIONS:
        raise ModelLoadError(
            f"config.json asks for the activation {named}; {', '.join(_ACTIVATIONS)} are served"
        )
    return _ACTIVATIONS[kind]
