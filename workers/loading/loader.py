"""From an EngineConfig to a model that can run: one rank's share of it, on its device.

Knows folders, implementations and dtypes. Knows no KV pool, no backend and no request.
"""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedConfig

from attention import AttentionConfig
from workers.config import EngineConfig
from workers.errors import ConfigError, ModelLoadError
from workers.layers.formats.layer import stored_by, unquantised
from workers.layers.formats.recipe import WeightRecipe
from workers.layers.sharding import ShardContext
from workers.loading.checkpoint import SafetensorsCheckpoint
from workers.loading.encoder_only import check_encoder_settings, encoder_only_class
from workers.loading.expert_load_file import copy_busiest_experts
from workers.loading.kept_formats import keeps_formats_on
from workers.loading.kv_scales import KVScale, read_kv_scales
from workers.loading.model_folder import (
    DTYPES,
    ModelFacts,
    architecture_of,
    dtype_on_gpu,
    model_facts,
    read_hf_config,
    resolve_model_folder,
)
from workers.loading.quantization.read import weight_recipe
from workers.loading.stacked_experts import has_stacked_experts
from workers.loading.weight_lanes import MAX_LANES, make_lanes, make_lanes_from_copy
from workers.loading.weights import OnProgress, fill_with_noise, load_checkpoint
from workers.loading.weights_cache import WeightsCache, WeightsLease
from workers.models.base import CausalLM, NativeCausalLM
from workers.models.registry import (
    NATIVE_ARCHITECTURES,
    choose_implementation,
    may_have_stacks,
)
from workers.parallel.group import TPGroup

__all__ = [
    "LoadedModel",
    "ModelFacts",
    "check_servable",
    "lease_weights",
    "load_model",
    "model_facts",
    "resolve_dtype",
]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in eval mode with its weights, on one rank.

    implementation: "native" or "transformers". dtype: of weights and activations. kv_scales: what
    the checkpoint says of an FP8 KV cache, one a layer, or nothing. lease: on the files of the
    weights, which parameters in host memory may be; held until the model is gone.
    """

    model: CausalLM
    facts: ModelFacts
    implementation: str
    dtype: torch.dtype
    device: torch.device
    kv_scales: tuple[KVScale, ...]
    lease: WeightsLease

    def attention_config(self, page_size: int, kv_dtype: torch.dtype) -> AttentionConfig:
        """The geometry that this rank's pools and attention backend are made for."""
        return self.model.geometry.attention_config(
            self.facts.max_context_len, page_size, self.dtype, kv_dtype, self.device
        )


@dataclass(frozen=True, slots=True)
class _LoadRequest:
    """What every way of loading needs."""

    config: EngineConfig
    facts: ModelFacts
    hf_config: PreTrainedConfig
    shard: ShardContext
    recipe: WeightRecipe | None
    lease: WeightsLease
    on_progress: OnProgress


@dataclass(frozen=True, slots=True)
class _Weights:
    """What every way of loading gives."""

    model: CausalLM
    kv_scales: tuple[KVScale, ...] = ()


def resolve_dtype(config: EngineConfig, device: torch.device) -> torch.dtype:
    """EngineConfig.dtype; "auto" is the checkpoint's own on CUDA and float32 on CPU."""
    if config.dtype != "auto":
        return DTYPES[config.dtype]
    if device.type == "cpu":
        return torch.float32
    return dtype_on_gpu(read_hf_config(resolve_model_folder(config.model)), config.dtype)


def _load_native(request: _LoadRequest) -> _Weights:
    facts, config = request.facts, request.config
    family = NATIVE_ARCHITECTURES[facts.architecture]
    model = family.build(request.hf_config, facts.max_context_len, request.shard)
    if config.num_redundant_experts and config.expert_load_file is not None:
        loads = Path(config.expert_load_file).expanduser()
        copy_busiest_experts(model, loads, request.shard.tp, request.shard.device)
    if request.recipe is None:
        stored = unquantised(model)
    else:
        keeps = keeps_formats_on(config, request.shard.dtype, request.shard.device)
        keeping = model.layers_as_stored() if keeps else ()
        stored = stored_by(request.recipe, model, request.shard, keeping)
    if config.load_format == "dummy":
        fill_with_noise(stored, request.shard, config.dummy_weights_seed, request.on_progress)
        return _Weights(model)
    checkpoint = SafetensorsCheckpoint(request.lease.folder)
    kv_scales = read_kv_scales(checkpoint, model.geometry.num_layers)
    make = make_lanes_from_copy if request.lease.is_copy else make_lanes
    lanes = make(request.shard.dtype, request.shard.device, _num_lanes(request.shard))
    load_checkpoint(model, stored, checkpoint, lanes, request.on_progress)
    return _Weights(model, kv_scales)


def _num_lanes(shard: ShardContext) -> int:
    """This rank's share of the cores: the ranks of a node load at the same time."""
    return max(1, min(MAX_LANES, len(os.sched_getaffinity(0)) // shard.tp.size))


def _load_transformers(request: _LoadRequest) -> _Weights:
    # Seconds of imports that native models do without.
    from workers.models.transformers_bridge import bridged
    from workers.models.transformers_model import (
        load_transformers_model,
        random_transformers_model,
    )

    facts, shard = request.facts, request.shard
    if request.config.load_format == "dummy":
        hf_model = random_transformers_model(
            request.hf_config, shard, request.config.dummy_weights_seed
        )
    else:
        total_bytes = SafetensorsCheckpoint(request.lease.folder).total_bytes
        request.on_progress(0, total_bytes)
        hf_model = load_transformers_model(request.lease.folder, request.hf_config, shard)
        request.on_progress(total_bytes, total_bytes)
    return _Weights(bridged(hf_model, facts.max_context_len))


_LOADERS: dict[str, Callable[[_LoadRequest], _Weights]] = {
    "native": _load_native,
    "transformers": _load_transformers,
}


def lease_weights(config: EngineConfig, folder: Path, on_progress: OnProgress) -> WeightsLease:
    """On the node's copy where there is a cache, else on the model folder itself."""
    if config.weights_cache_dir is None or config.load_format == "dummy":
        return WeightsLease.of_source(folder)
    root = Path(config.weights_cache_dir).expanduser()
    return WeightsCache(root, config.weights_cache_bytes).lease(folder, on_progress)


def _after(bytes_awaited: int, on_progress: OnProgress) -> OnProgress:
    """Progress that goes on where copying ended, as bytes of both."""

    def on_bytes(bytes_done: int, bytes_total: int) -> None:
        on_progress(bytes_awaited + bytes_done, bytes_awaited + bytes_total)

    return on_bytes


def _no_progress(bytes_done: int, bytes_total: int) -> None:
    """Nobody watches."""


def check_servable(config: EngineConfig) -> None:
    """Raise ModelLoadError or ConfigError if config.model cannot run here, as far as its folder's
    small files tell. Reads no weights."""
    if encoder_only_class(read_hf_config(resolve_model_folder(config.model))) is not None:
        check_encoder_settings(config)
        _check_unquantised(config)
    else:
        _choose(config, _device_type_of(config))
    model_facts(config)


def _check_unquantised(config: EngineConfig) -> None:
    """Of an encoder alone."""
    recipe = weight_recipe(resolve_model_folder(config.model), config.quantization)
    if recipe is not None:
        raise ModelLoadError(f"encoders are served unquantised, not by {recipe.name}")


def _device_type_of(config: EngineConfig) -> str:
    """Of EngineConfig.device, as far as it can be told without making use of one."""
    if config.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return config.device.partition(":")[0]


def _choose(config: EngineConfig, device_type: str) -> tuple[PreTrainedConfig, str]:
    """(config of transformers, implementation). Before any limit is looked for: what a class that
    cannot be served calls its limits does not matter."""
    folder = resolve_model_folder(config.model)
    hf_config = read_hf_config(folder)
    architecture = architecture_of(hf_config)
    if encoder_only_class(hf_config) is not None:
        raise ModelLoadError(f"{architecture} is an encoder alone and generates no text")
    recipe = weight_recipe(folder, config.quantization)
    # Dummy weights are read from no tensor.
    reads_names = config.load_format != "dummy" and may_have_stacks(architecture)
    implementation = choose_implementation(
        hf_config,
        architecture,
        config,
        device_type,
        is_quantised=recipe is not None,
        has_stacks=reads_names and has_stacked_experts(folder),
    )
    if recipe is not None and implementation != "native":
        raise ModelLoadError(
            f"{architecture} runs through transformers, and weights quantised by {recipe.name} are "
            f"served natively only: {', '.join(NATIVE_ARCHITECTURES)}"
        )
    return hf_config, implementation


def _check_ranks(hf_config: PreTrainedConfig, facts: ModelFacts, tp: TPGroup) -> None:
    """Of what transformers runs. Raises ConfigError. Reads no weights."""
    from workers.models.transformers_class import is_encoder_decoder

    if is_encoder_decoder(hf_config) and tp.size > 1:
        raise ConfigError(
            f"{facts.architecture} is an encoder-decoder and runs on one rank only so far; set "
            "tp_size=1"
        )


def load_model(
    config: EngineConfig,
    tp: TPGroup,
    device: torch.device,
    dtype: torch.dtype,
    on_progress: OnProgress = _no_progress,
) -> LoadedModel:
    """Build this rank's share of config.model on device and fill it with weights.

    on_progress(bytes_done, bytes_total) is called as weights arrive, in the node's cache first if
    they were not there (load_format "dummy" counts tensors instead). Raises ModelLoadError for a
    folder that cannot be served, ConfigError for a configuration that does not fit the model. Ranks
    load independently; a model of transformers is then probed by all of them together.
    """
    hf_config, implementation = _choose(config, device.type)
    facts = model_facts(config)
    if implementation == "transformers":
        _check_ranks(hf_config, facts, tp)
    logger.info(
        "loading %s (%s, %s) as %s on %s, rank %d of %d",
        facts.name,
        facts.architecture,
        implementation,
        dtype,
        device,
        tp.rank,
        tp.size,
    )
    recipe = weight_recipe(facts.folder, config.quantization)
    if recipe is not None:
        logger.info("weights by %s: %s", recipe.name, ", ".join(recipe.titles))
    shard = ShardContext(
        tp,
        dtype,
        device,
        config.deterministic,
        config.ep_size,
        recipe is not None,
        config.num_redundant_experts,
    )
    lease = lease_weights(config, facts.folder, on_progress)
    on_progress = _after(lease.bytes_awaited, on_progress)
    request = _LoadRequest(config, facts, hf_config, shard, recipe, lease, on_progress)
    weights = _LOADERS[implementation](request)
    model = weights.model
    if isinstance(model, NativeCausalLM) and recipe is not None:
        layers = model.layers_as_stored()
        num_kept = sum(layer.is_kept for layer in layers)
        logger.info("%d of %d layers keep their weights as stored", num_kept, len(layers))
    if device.type == "cuda":
        # What loading needed beside the weights is the KV pool's.
        torch.cuda.empty_cache()
    if model.vocab_size != facts.vocab_size:
        raise ModelLoadError(
            f"config.json says vocab_size={facts.vocab_size}, but the model gives "
            f"{model.vocab_size} logits"
        )
    return LoadedModel(model.eval(), facts, implementation, dtype, device, weights.kv_scales, lease)
