"""Which implementation runs an architecture: a native one, or transformers' own code."""

from collections.abc import Callable
from typing import Literal

import transformers
from transformers import PreTrainedConfig

from workers.config import ModelImpl
from workers.errors import ModelLoadError
from workers.layers.sharding import ShardContext
from workers.models.base import NativeCausalLM
from workers.models.llama import LlamaForCausalLM
from workers.models.llama_family import llama_family_spec

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
    """auto: native if the architecture has a native class, else transformers.

    Raises ModelLoadError, saying what is supported, when the choice cannot run the architecture.
    """
    is_native = architecture in NATIVE_ARCHITECTURES
    if requested == "native" and not is_native:
        raise ModelLoadError(f"{architecture} has no native class; {supported_models()}")
    if is_native and requested != "transformers":
        return "native"
    # Seconds of imports that native models do without.
    from workers.models.transformers_model import causal_lm_class

    try:
        causal_lm_class(config)
    except ModelLoadError as error:
        raise ModelLoadError(f"{architecture}: {error}. Supported: {supported_models()}") from error
    return "transformers"
