"""A rank's share of a model without memory: its shapes are those of what would be loaded."""

from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedConfig

from attention.memory.slot_states import StateEntry
from workers.adapters.banks import NOT_FUSED
from workers.config import EngineConfig
from workers.errors import ConfigError
from workers.layers.formats.layer import stored_by
from workers.layers.formats.recipe import WeightRecipe
from workers.layers.sharding import ShardContext
from workers.loading.kept_formats import FIRST_WITH_PRODUCTS, keeps_formats
from workers.loading.model_folder import ModelFacts
from workers.models.base import AttentionGeometry
from workers.models.fused_members import grouped_layers_as_stored
from workers.models.registry import NATIVE_ARCHITECTURES
from workers.parallel.group import SingleRank
from workers.survey.adapters import adapter_banks
from workers.survey.formats import StoredFormat, settle_formats
from workers.survey.stated_geometry import stated_geometry

_META = torch.device("meta")


@dataclass(frozen=True, slots=True)
class MetaModel:
    """Of rank 0. weight_bytes: parameters and buffers, as they lie in memory. geometry: None where
    only a run shows it. state_entries: as CausalLM; None where only a run shows whether there are
    any. continues_states: as CausalLM, of models of transformers what takes more memory. formats:
    of layers that are stored in one. adapter_bytes: of the slots of adapters."""

    weight_bytes: int
    geometry: AttentionGeometry | None
    state_entries: tuple[StateEntry, ...] | None = ()
    continues_states: bool = True
    formats: tuple[StoredFormat, ...] = ()
    adapter_bytes: int = 0


class _FirstRank(SingleRank):
    """Of size ranks, that never meet: what they would hand over is of the others' shapes."""

    def __init__(self, size: int) -> None:
        self.size = size

    def all_gather_last_dim(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor] * self.size, dim=-1)


def native_on_meta(
    config: EngineConfig,
    facts: ModelFacts,
    hf_config: PreTrainedConfig,
    dtype: torch.dtype,
    recipe: WeightRecipe | None,
) -> MetaModel:
    """On "cuda" of a GPU with products for quantised weights. Raises ConfigError where
    config.tp_size and ep_size cannot cut it, as load_model does."""
    shard = _shard(config, dtype, recipe is not None)
    family = NATIVE_ARCHITECTURES[facts.architecture]
    model = family.build(hf_config, facts.max_context_len, shard)
    formats: tuple[StoredFormat, ...] = ()
    if recipe is not None:
        gpu = FIRST_WITH_PRODUCTS if config.device == "cuda" else None
        keeps = keeps_formats(config, dtype, gpu) and family.has_stored_products(hf_config, dtype)
        keeping = grouped_layers_as_stored(model.modules()) if keeps else ()
        formats = settle_formats(stored_by(recipe, model, shard, keeping))
    if (
        config.max_loras
        and config.device == "cuda"
        and not is_fused_on_gpu(facts, hf_config, dtype)
    ):
        raise ConfigError(NOT_FUSED)
    banks = adapter_banks(config, model, facts.architecture, dtype)
    return MetaModel(
        _num_bytes(model),
        model.geometry,
        model.state_entries,
        model.continues_states,
        formats,
        0 if banks is None else banks.num_bytes,
    )


def is_fused_on_gpu(facts: ModelFacts, hf_config: PreTrainedConfig, dtype: torch.dtype) -> bool:
    """Whether the native class of a family that takes adapters has fused layers on a GPU: those are
    what products of stored weights are for."""
    return NATIVE_ARCHITECTURES[facts.architecture].has_stored_products(hf_config, dtype)


def bridged_on_meta(
    config: EngineConfig, facts: ModelFacts, hf_config: PreTrainedConfig, dtype: torch.dtype
) -> MetaModel:
    """Raises ModelLoadError and ConfigError as load_model does before it reads weights."""
    # Seconds of imports that native models do without.
    from workers.models.transformers_model import random_transformers_model
    from workers.survey.bridged_states import states_on_meta

    model = random_transformers_model(hf_config, _shard(config, dtype, False), seed=0)
    # Raises where there are to be any.
    adapter_banks(config, model, facts.architecture, dtype)
    geometry = stated_geometry(hf_config, config.tp_size)
    return MetaModel(_num_bytes(model), geometry, states_on_meta(model))


def _shard(config: EngineConfig, dtype: torch.dtype, has_formats: bool) -> ShardContext:
    group = _FirstRank(config.tp_size)
    return ShardContext(
        group,
        dtype,
        _META,
        config.deterministic,
        config.ep_size,
        has_formats,
        config.num_redundant_experts,
    )


def _num_bytes(model: nn.Module) -> int:
    tensors = (*model.parameters(), *model.buffers())
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
