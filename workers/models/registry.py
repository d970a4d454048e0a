"""Which implementation runs an architecture: a native one, or transformers' own code."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import transformers
from transformers import PreTrainedConfig

from attention.registry import LATENT_BACKENDS
from workers.config import EngineConfig
from workers.errors import ConfigError, ModelLoadError
from workers.layers.sharding import ShardContext
from workers.loading.model_folder import dtype_on_gpu
from workers.models.base import NativeCausalLM
from workers.models.deepseek import DeepseekForCausalLM
from workers.models.deepseek_family import deepseek_obstacle, deepseek_spec
from workers.models.fused_members import has_fused_gemma, has_fused_llama
from workers.models.gemma import GemmaForCausalLM
from workers.models.gemma_family import gemma_obstacle, gemma_spec
from workers.models.llama import LlamaForCausalLM
from workers.models.llama4 import Llama4ForCausalLM
from workers.models.llama4_family import llama4_obstacle, llama4_spec
from workers.models.llama_family import llama_family_spec, native_obstacle
from workers.models.qwen3_next import Qwen3NextForCausalLM
from workers.models.qwen3_next_family import qwen3_next_obstacle, qwen3_next_spec
from workers.speculation.config import METHODS_READING_STATES

logger = logging.getLogger(__name__)

BuildNative = Callable[[PreTrainedConfig, int, ShardContext], NativeCausalLM]


def _build_llama_family(
    config: PreTrainedConfig, max_context_len: int, shard: ShardContext
) -> NativeCausalLM:
    spec = llama_family_spec(config)
    if shard.device.type != "cuda":
        return LlamaForCausalLM(spec, max_context_len, shard)
    # Triton comes with torch for CUDA only.
    from workers.models.cuda_llama import CudaLlamaForCausalLM

    is_fused = has_fused_llama(spec, shard.dtype)
    build = CudaLlamaForCausalLM if is_fused else LlamaForCausalLM
    return build(spec, max_context_len, shard)


def _build_gemma_family(
    config: PreTrainedConfig, max_context_len: int, shard: ShardContext
) -> NativeCausalLM:
    spec = gemma_spec(config)
    if shard.device.type != "cuda":
        return GemmaForCausalLM(spec, max_context_len, shard)
    # Triton comes with torch for CUDA only.
    from workers.models.cuda_gemma import CudaGemmaForCausalLM

    build = CudaGemmaForCausalLM if has_fused_gemma(spec) else GemmaForCausalLM
    return build(spec, max_context_len, shard)


def _build_deepseek_family(
    config: PreTrainedConfig, max_context_len: int, shard: ShardContext
) -> NativeCausalLM:
    spec = deepseek_spec(config)
    if shard.device.type == "cuda":
        # Triton comes with torch for CUDA only.
        from workers.models.cuda_deepseek import CudaDeepseekForCausalLM, has_fused_layers

        if has_fused_layers(spec, shard):
            return CudaDeepseekForCausalLM(spec, max_context_len, shard)
    return DeepseekForCausalLM(spec, max_context_len, shard)


def _build_llama4(
    config: PreTrainedConfig, max_context_len: int, shard: ShardContext
) -> NativeCausalLM:
    return Llama4ForCausalLM(llama4_spec(config), max_context_len, shard)


def _build_qwen3_next(
    config: PreTrainedConfig, max_context_len: int, shard: ShardContext
) -> NativeCausalLM:
    return Qwen3NextForCausalLM(qwen3_next_spec(config), max_context_len, shard)


OfMembers = Callable[[PreTrainedConfig, torch.dtype], bool]
"""What is true of some members of a family: of these configs with weights of this dtype."""


def every_member(config: PreTrainedConfig, dtype: torch.dtype) -> bool:
    return True


def no_member(config: PreTrainedConfig, dtype: torch.dtype) -> bool:
    return False


def _fused_llamas(config: PreTrainedConfig, dtype: torch.dtype) -> bool:
    return has_fused_llama(llama_family_spec(config), dtype)


def _fused_gemmas(config: PreTrainedConfig, dtype: torch.dtype) -> bool:
    return has_fused_gemma(gemma_spec(config))


@dataclass(frozen=True, slots=True)
class NativeFamily:
    """Models of one native class.

    obstacle: why a config that names one of its architectures is not for it, or None.
    keeps_latents: whether it needs multi-head latent attention of the backend. has_experts: whether
    layers may be mixtures of experts; reads_stacks: whether its checkpoints have those of a layer
    in one tensor. has_windows: whether every member has layers that let tokens
    go. has_states: whether layers keep a state. takes_adapters: whether low-rank
    adapters may change its layers. is_measured: of members that were found to be faster on one GPU
    than transformers' code around this repository's kernels. has_stored_products: of members whose
    class on NVIDIA GPUs names grouped_layers_as_stored.
    """

    build: BuildNative
    obstacle: Callable[[Any], str | None]
    keeps_latents: bool = False
    has_experts: bool = False
    reads_stacks: bool = False
    has_windows: bool = False
    has_states: bool = False
    takes_adapters: bool = False
    is_measured: OfMembers = every_member
    has_stored_products: OfMembers = no_member


_LLAMA = NativeFamily(
    _build_llama_family,
    native_obstacle,
    takes_adapters=True,
    has_stored_products=_fused_llamas,
)
_GEMMA = NativeFamily(
    _build_gemma_family,
    gemma_obstacle,
    has_windows=True,
    takes_adapters=True,
    has_stored_products=_fused_gemmas,
)
_LLAMA_MIXTURE = replace(_LLAMA, has_experts=True, is_measured=_fused_llamas)
_DEEPSEEK = NativeFamily(
    _build_deepseek_family, deepseek_obstacle, keeps_latents=True, has_experts=True
)
_LLAMA4 = NativeFamily(
    _build_llama4,
    llama4_obstacle,
    has_experts=True,
    reads_stacks=True,
    has_windows=True,
    is_measured=no_member,
)
_QWEN3_NEXT = NativeFamily(
    _build_qwen3_next, qwen3_next_obstacle, has_experts=True, has_states=True, is_measured=no_member
)

NATIVE_ARCHITECTURES: dict[str, NativeFamily] = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _LLAMA,
    "Qwen2ForCausalLM": _LLAMA,
    "Qwen3ForCausalLM": _LLAMA,
    "MixtralForCausalLM": _LLAMA_MIXTURE,
    "Qwen2MoeForCausalLM": _LLAMA_MIXTURE,
    "Qwen3MoeForCausalLM": _LLAMA_MIXTURE,
    "GptOssForCausalLM": replace(
        _LLAMA_MIXTURE, reads_stacks=True, has_windows=True, is_measured=every_member
    ),
    # Its heads rotate in part: no fused kernels, and another routing than what was measured.
    "Glm4MoeForCausalLM": replace(_LLAMA_MIXTURE, is_measured=no_member),
    "Llama4ForCausalLM": _LLAMA4,
    "Llama4ForConditionalGeneration": _LLAMA4,
    "Qwen3NextForCausalLM": _QWEN3_NEXT,
    "Gemma2ForCausalLM": _GEMMA,
    "Gemma3ForCausalLM": _GEMMA,
    "Gemma3ForConditionalGeneration": _GEMMA,
    "DeepseekV2ForCausalLM": _DEEPSEEK,
    "DeepseekV3ForCausalLM": _DEEPSEEK,
    "Glm4MoeLiteForCausalLM": _DEEPSEEK,
    "YoutuForCausalLM": replace(_DEEPSEEK, has_experts=False),
}


def supported_models() -> str:
    """What can be served, in words, for error messages."""
    return (
        f"native: {', '.join(NATIVE_ARCHITECTURES)}; otherwise decoders of transformers "
        f"{transformers.__version__} that attend through its attention interface or keep keys and "
        "values in its cache, and encoder-decoders such as BART and Whisper"
    )


def choose_implementation(
    config: PreTrainedConfig,
    architecture: str,
    engine: EngineConfig,
    device_type: str,
    *,
    is_quantised: bool = False,
    has_stacks: bool = False,
) -> Literal["native", "transformers"]:
    """By engine.model_impl. auto: native if the architecture has a native class that fits the
    config, and the engine's settings have what it needs, else transformers, which runs nothing
    quantised. has_stacks: whether the checkpoint has a layer's experts in one tensor, where
    may_have_stacks.

    Raises ModelLoadError, saying what is supported, when the choice cannot run the architecture,
    ConfigError when it can, but not on engine.tp_size ranks or with engine.speculation.
    """
    requested = engine.model_impl
    if requested != "transformers":
        obstacle = _native_obstacle(config, architecture, engine, has_stacks)
        if obstacle is None and (
            is_quantised or not _is_left_to_transformers(config, architecture, engine, device_type)
        ):
            return "native"
        if requested == "native":
            raise ModelLoadError(obstacle)
        if obstacle is not None and architecture in NATIVE_ARCHITECTURES:
            logger.warning("%s; it runs through transformers", obstacle)
    _check_transformers(config, architecture)
    _check_drafts(config, architecture, engine, device_type, has_stacks)
    if engine.ep_size > 1:
        raise ConfigError(f"{architecture} runs through transformers, without ep_size")
    if engine.tp_size > 1:
        _check_ranks(config, engine.tp_size, device_type)
    return "transformers"


def may_have_stacks(architecture: str) -> bool:
    """Whether a checkpoint may have a layer's experts in one tensor where the native class reads
    one each."""
    family = NATIVE_ARCHITECTURES.get(architecture)
    return family is not None and family.has_experts and not family.reads_stacks


def why_not_native(
    config: PreTrainedConfig,
    architecture: str,
    engine: EngineConfig,
    device_type: str,
    *,
    has_stacks: bool = False,
) -> str:
    """Why choose_implementation leaves an unquantised model to transformers; "" where it does not.
    Raises ConfigError for ep_size without experts."""
    if engine.model_impl == "transformers":
        return "model_impl='transformers' was asked for"
    if architecture not in NATIVE_ARCHITECTURES:
        return f"{architecture} has no native class"
    obstacle = _native_obstacle(config, architecture, engine, has_stacks)
    if obstacle is not None:
        return obstacle
    if _is_left_to_transformers(config, architecture, engine, device_type):
        return "natively it was not measured on one GPU; model_impl='native' asks for it"
    return ""


def _native_obstacle(
    config: PreTrainedConfig, architecture: str, engine: EngineConfig, has_stacks: bool
) -> str | None:
    """Why the config cannot run natively, and what can be done. A config may state a native
    architecture and be of another kind, for which transformers has code of its own."""
    family = NATIVE_ARCHITECTURES.get(architecture)
    if family is None:
        return f"{architecture} has no native class; {supported_models()}"
    obstacle = family.obstacle(config)
    if obstacle is None and family.keeps_latents:
        obstacle = _latent_obstacle(engine)
    if obstacle is None and has_stacks:
        obstacle = "its checkpoint has the experts of a layer in one tensor"
    if obstacle is None:
        if engine.ep_size > 1 and not family.has_experts:
            raise ConfigError(f"{architecture} has no experts; leave ep_size out")
        return None
    return f"{architecture} cannot run natively: {obstacle}; model_impl='transformers' may run it"


def _is_left_to_transformers(
    config: PreTrainedConfig, architecture: str, engine: EngineConfig, device_type: str
) -> bool:
    """On one GPU, what nobody has measured natively runs as it did before, unless asked for, or for
    drafts that only a native class has states for. config: of a member of its family."""
    if device_type != "cuda" or engine.model_impl != "auto" or engine.tp_size > 1:
        return False
    speculation = engine.speculation
    if speculation is not None and speculation.method in METHODS_READING_STATES:
        return False
    family = NATIVE_ARCHITECTURES[architecture]
    return not family.is_measured(config, dtype_on_gpu(config, engine.dtype))


def _latent_obstacle(engine: EngineConfig) -> str | None:
    """What latent attention lacks for these settings. The models then run as ordinary attention,
    with K and V of every head in the pool."""
    if engine.kv_cache_dtype != "auto":
        return f"latents are not kept as {engine.kv_cache_dtype}"
    names = [backend.capability.name for backend in LATENT_BACKENDS]
    for asked in (engine.prefill_backend, engine.decode_backend):
        if asked not in (None, *names):
            return f"{asked} has no multi-head latent attention"
    return None


def _check_transformers(config: PreTrainedConfig, architecture: str) -> None:
    # Seconds of imports that native models do without.
    from workers.models.transformers_seq2seq_class import served_class

    try:
        served_class(config)
    except ModelLoadError as error:
        raise ModelLoadError(f"{architecture}: {error}. Supported: {supported_models()}") from error


def _check_drafts(
    config: PreTrainedConfig,
    architecture: str,
    engine: EngineConfig,
    device_type: str,
    has_stacks: bool,
) -> None:
    """transformers' class has no room for the layer. Raises ConfigError."""
    if engine.speculation is None or engine.speculation.method != "mtp":
        return
    reason = why_not_native(config, architecture, engine, device_type, has_stacks=has_stacks)
    raise ConfigError(
        f"speculative 'mtp': {architecture} runs through transformers, which does not read the "
        f"layer for multi-token prediction ({reason}); run it natively or take another method"
    )


def _check_ranks(config: PreTrainedConfig, tp_size: int, device_type: str) -> None:
    from workers.models.transformers_parallel import check_tensor_parallel
    from workers.models.transformers_seq2seq_class import served_class

    check_tensor_parallel(served_class(config), config, tp_size, device_type)
