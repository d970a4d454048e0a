"""Which kind of models of transformers a config is of, as far as its class tells."""

from transformers import PreTrainedConfig

from workers.models.features import FLAT, ROW_BY_ROW, SEQ2SEQ, STATEFUL, ModelCapability
from workers.models.transformers_class import is_encoder_decoder, may_keep_states
from workers.models.transformers_seq2seq_class import served_class


def bridged_capability(config: PreTrainedConfig) -> ModelCapability:
    """Raises ModelLoadError for what cannot be served."""
    model_class = served_class(config)
    if is_encoder_decoder(config):
        return SEQ2SEQ
    if may_keep_states(config, model_class):
        return STATEFUL
    return FLAT if model_class._supports_attention_backend else ROW_BY_ROW
