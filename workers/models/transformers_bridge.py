"""Which way a loaded model of transformers runs: as one flat batch, row by row, or as a decoder
beside its encoder."""

import logging

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from workers.errors import ConfigError, ModelLoadError
from workers.loading.model_folder import text_config_of
from workers.models.base import CausalLM
from workers.models.transformers_attention import ATTENTION_NAME, OWN_ATTENTION_NAME
from workers.models.transformers_class import may_keep_states
from workers.models.transformers_experts import distinct_experts, fuse_experts
from workers.models.transformers_model import TransformersCausalLM
from workers.models.transformers_norms import fuse_norms
from workers.models.transformers_parts import BodyAndHead
from workers.models.transformers_rope import fix_rope
from workers.models.transformers_row_model import RowByRowCausalLM
from workers.models.transformers_seq2seq import TransformersSeq2Seq

logger = logging.getLogger(__name__)


def bridged(hf_model: PreTrainedModel, max_context_len: int) -> CausalLM:
    """hf_model: in eval mode, on its device; taken over.

    Raises ModelLoadError for a model that would be served wrongly either way.
    """
    if hf_model.config.is_encoder_decoder:
        return TransformersSeq2Seq(hf_model)
    parts = BodyAndHead.of(hf_model)
    config = text_config_of(parts.head.config)
    if parts.head.device.type == "cuda":
        _fuse(parts, getattr(config, "num_experts_per_tok", None))
    fix_rope(parts.body, config, max_context_len)
    _check_kept_window(config, max_context_len)
    if config._attn_implementation != ATTENTION_NAME:
        return _row_by_row(parts, _own_attention_obstacle(parts))
    try:
        return TransformersCausalLM(parts)
    except ModelLoadError as error:
        if may_keep_states(config, type(parts.head)):
            raise
        return _row_by_row(parts, str(error))


@torch.inference_mode()
def _fuse(parts: BodyAndHead, num_chosen: int | None) -> None:
    """num_chosen: experts of a token, where the config says so."""
    # Triton comes with torch for CUDA only.
    from workers.layers.cuda.norm import rms_norm
    from workers.layers.cuda.routed_experts import compile_ahead, routed_products

    num_norms = fuse_norms(parts.body, rms_norm)
    num_mixtures = fuse_experts(parts.body, routed_products)
    logger.info(
        "%d RMSNorms run as a kernel each, %d mixtures of experts in grouped products",
        num_norms,
        num_mixtures,
    )
    if num_chosen is not None:
        for weights in distinct_experts(parts.body):
            compile_ahead(weights, num_chosen)


def _own_attention_obstacle(parts: BodyAndHead) -> str:
    """Of a class that picks attention from a table of its own."""
    return f"{type(parts.head).__name__} has no place for another attention than its own"


def _row_by_row(parts: BodyAndHead, obstacle: str) -> CausalLM:
    """obstacle: why it cannot be a flat batch."""
    _use_own_attention(parts.head)
    try:
        model = RowByRowCausalLM(parts)
    except ModelLoadError as error:
        if str(error) in obstacle:
            raise ModelLoadError(obstacle) from error
        raise ModelLoadError(f"{obstacle}; row by row it {error}") from error
    logger.info("%s", obstacle)
    return model


def _check_kept_window(config: PreTrainedConfig, max_context_len: int) -> None:
    """Beyond its window Doge keeps the keys of the highest scores. Equal tokens have equal ones in
    its first layer, and which of them it keeps depends on how many keys there are in a call."""
    window = getattr(config, "keep_window_size", max_context_len)
    if window < max_context_len:
        raise ConfigError(
            f"{config.model_type} drops keys beyond keep_window_size={window}, which would depend "
            f"on how a text is computed; lower max_context_len={max_context_len}"
        )


def _use_own_attention(model: PreTrainedModel) -> None:
    for module in model.modules():
        config = getattr(module, "config", None)
        if isinstance(config, PreTrainedConfig) and config._attn_implementation == ATTENTION_NAME:
            config._attn_implementation = OWN_ATTENTION_NAME
