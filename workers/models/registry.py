"""Which implementation runs an architecture: a native one, or transformers' own code."""

import logging
from collections.abc import Callable
from typing import Literal

import transformers
from transformers import PreTrainedConfig

from workers.config import ModelImpl
from workers.errors import ModelLoadError
from workers.layers.sharding import ShardContext
from workers.models.base import NativeCausalLM
from workers.models.llama import LlamaForCausalLM
from workers.models.llama_family import llama_family_spec, native_obstacle

logger = logging.getLogger(__name__)

BuildNative = Callable[[PreTrainedConfig, int, ShardContext], NativeCausalLM]


def _build_llama_family(
    config: PreTrainedConfig, max_context_len: int, shard: ShardContext
) -> NativeCausalLM:
    spec = llama_family_spec(config)
    if shard.device.type != "cuda":
        return LlamaForCausalLM(spec, max_context_len, shard)
    # Triton comes with torch for CUDA only.
    from workers.models.cuda_llama import CudaLlamaForCausalLM, has_fused_layers

    build = CudaLlamaForCausalLM if has_fused_layers(spec) else LlamaForCausalLM
    return build(spec, max_context_len, shard)


NATIVE_ARCHITECTURES: dict[str, BuildNative] = {
    "LlamaForCausalLM": _build_llama_family,
    "MistralForCausalLM": _build_llama_family,
    "Qwen2ForCausalLM": _build_llama_family,
    "Qwen3ForCausalLM": _build_llama_family,
}


def supported_models() -> str:
    """What can be served, in words, for error messages."""
    return (
        f"native: {', '.join(NATIVE_ARCHITECTURES)}; otherwise decoders of transformers "
        f"{transformers.__version__} that attend through its attention interface"
    )


def choose_implementation(
    config: PreTrainedConfig, architecture: str, requested: ModelImpl
) -> Literal["native", "transformers"]:
    """auto: native if the architecture has a native class that fits the config, else transformers.

    Raises ModelLoadError, saying what is supported, when the choice cannot run the architecture.
    """
    if requested != "transformers":
        obstacle = _native_obstacle(config, architecture)
        if obstacle is None:
            return "native"
        if requested == "native":
            raise ModelLoadError(obstacle)
        if architecture in NATIVE_ARCHITECTURES:
            logger.warning("%s; it runs through transformers", obstacle)
    _check_transformers(config, architecture)
    return "transformers"


def _native_obstacle(config: PreTrainedConfig, architecture: str) -> str | None:
    """Why the config cannot run natively, and what can be done. A config may state a native
    architecture and be of another kind, for which transformers has code of its own."""
    if architecture not in NATIVE_ARCHITECTURES:
        return f"{architecture} has no native class; {supported_models()}"
    obstacle = native_obstacle(config)
    if obstacle is None:
        return None
    return f"{architecture} cannot run natively: {obstacle}; model_impl='transformers' may run it"


def _check_transformers(config: PreTrainedConfig, architecture: str) -> None:
    # Seconds of imports that native models do without.
    from workers.models.transformers_class import causal_lm_class

    try:
        causal_lm_class(config)
    except ModelLoadError as error:
        raise ModelLoadError(f"{architecture}: {error}. Supported: {supported_models()}") from error
