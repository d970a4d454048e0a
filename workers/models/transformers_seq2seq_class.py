"""Which encoder-decoders of transformers are served, by name. Builds no model.

Others would need what is not known of them: encoders that attend in blocks or by relative
positions, decoders that count positions from their padding, inputs of other kinds.
"""

from typing import Any

from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING,
)

from workers.errors import ModelLoadError
from workers.models.transformers_class import causal_lm_class, is_encoder_decoder

READS_TEXT = frozenset(
    (
        "BartForConditionalGeneration",
        "BlenderbotForConditionalGeneration",
        "BlenderbotSmallForConditionalGeneration",
        "MBartForConditionalGeneration",
        "MarianMTModel",
        "PLBartForConditionalGeneration",
        "PegasusForConditionalGeneration",
    )
)
READS_AUDIO = frozenset(("WhisperForConditionalGeneration",))
_SERVED = READS_TEXT | READS_AUDIO
_MAPPINGS = (MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING)


def served_class(config: PreTrainedConfig) -> Any:
    """transformers' class for the config, of a decoder or of an encoder-decoder.

    Raises ModelLoadError if it cannot be served.
    """
    return seq2seq_class(config) if is_encoder_decoder(config) else causal_lm_class(config)


def seq2seq_class(config: PreTrainedConfig) -> Any:
    """Raises ModelLoadError for an encoder-decoder that is none of those served."""
    found: list[Any] = [mapping[type(config)] for mapping in _MAPPINGS if type(config) in mapping]
    for model_class in found:
        name = model_class.__name__
        if name in _SERVED and name in (config.architectures or [name]):
            return model_class
    what = ", ".join(config.architectures or [config.model_type])
    raise ModelLoadError(
        f"{what} is an encoder-decoder; of these {', '.join(sorted(_SERVED))} are served"
    )
