"""The layer for multi-token prediction of a target's own checkpoint, quantised as that is.

Knows no KV memory.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn

from workers.config import EngineConfig
from workers.errors import ConfigError, ModelLoadError
from workers.layers.formats.layer import StoredTensors, stored_by, unquantised
from workers.layers.sharding import ShardContext
from workers.loading.checkpoint import SafetensorsCheckpoint
from workers.loading.draft_head import LoadedHead
from workers.loading.loader import LoadedModel
from workers.loading.model_folder import read_hf_config, text_config_of
from workers.loading.quantization.read import weight_recipe
from workers.loading.weights import check_shapes, fill_with_noise, shown
from workers.models.deepseek_family import deepseek_spec
from workers.models.llama_family import llama_family_spec
from workers.models.mtp_head import MtpHead, deepseek_layer, llama_layer

_EMBEDDING = "embed_tokens.weight"
_HEAD = "shared_head.head.weight"
_OF_TARGET = {_EMBEDDING: "model.embed_tokens.weight", _HEAD: "lm_head.weight"}
"""What a checkpoint may leave out, and the target's tensor that it then is."""

MakeLayer = Callable[[Any, int, ShardContext], nn.Module]
LAYERS: dict[str, MakeLayer] = {
    "Glm4MoeForCausalLM": lambda c, n, shard: llama_layer(llama_family_spec(c), n, shard),
    "DeepseekV3ForCausalLM": lambda c, n, shard: deepseek_layer(deepseek_spec(c), n, shard),
}
"""By the target's architecture."""


def load_mtp_head(config: EngineConfig, target: LoadedModel, shard: ShardContext) -> LoadedHead:
    """This rank's share of the first such layer. Raises ConfigError for targets without one,
    ModelLoadError where its tensors are not those of the target's kind."""
    facts = target.facts
    if target.implementation != "native" or facts.architecture not in LAYERS:
        raise ConfigError(
            f"speculative 'mtp': {facts.architecture} is not one of those whose layer is read, "
            f"natively run {', '.join(LAYERS)}"
        )
    hf_config: Any = text_config_of(read_hf_config(facts.folder))
    if not getattr(hf_config, "num_nextn_predict_layers", None):
        raise ConfigError(
            f"speculative 'mtp': {facts.name} has no layer for it (num_nextn_predict_layers)"
        )
    recipe = weight_recipe(facts.folder, config.quantization)
    shard = replace(shard, has_formats=recipe is not None)
    layer = LAYERS[facts.architecture](hf_config, facts.max_context_len, shard)
    sizes = facts.vocab_size, hf_config.hidden_size
    head = MtpHead(layer, target.model.geometry, sizes, hf_config.rms_norm_eps, shard)
    prefix = f"model.layers.{hf_config.num_hidden_layers}."
    named = _under(prefix, head)
    stored = unquantised(named) if recipe is None else stored_by(recipe, named, shard)
    if config.load_format == "dummy":
        fill_with_noise(stored, shard, config.dummy_weights_seed, lambda done, total: None)
    else:
        _fill(SafetensorsCheckpoint(facts.folder), stored, prefix, hf_config)
    return LoadedHead(
        head.eval(),
        hf_config.hidden_size,
        facts.max_context_len,
        shard.dtype,
        shard.device,
        taps_final_states=True,
    )


def _under(prefix: str, head: MtpHead) -> nn.Module:
    """A module in which the head has the names of the checkpoint."""
    named: nn.Module = head
    for name in reversed(prefix.rstrip(".").split(".")):
        around = nn.Module()
        around.add_module(name, named)
        named = around
    return named


def _fill(
    checkpoint: SafetensorsCheckpoint, stored: StoredTensors, prefix: str, hf_config: Any
) -> None:
    found = {name for name in checkpoint.names if name.startswith(prefix)} - stored.unread
    found = {name for name in found if not name.endswith("rotary_emb.inv_freq")}
    instead = dict(_OF_TARGET)
    if hf_config.tie_word_embeddings:
        instead[_HEAD] = _OF_TARGET[_EMBEDDING]
    names = {slot: slot for slot in stored.slots}
    names |= {prefix + own: of for own, of in instead.items() if prefix + own not in found}
    missing = set(names.values()) - checkpoint.names
    if missing:
        raise ModelLoadError(f"the checkpoint lacks {len(missing)} tensors: {shown(missing)}")
    unknown = found - set(names)
    if unknown:
        raise ModelLoadError(
            f"the checkpoint has {len(unknown)} tensors that its layer for multi-token prediction "
            f"has no use for: {shown(unknown)}"
        )
    with checkpoint.opened(set(names.values())) as tensors:
        by_slot = {slot: tensors[name] for slot, name in names.items()}
        check_shapes(stored.slots, by_slot)
        for slot, tensor in by_slot.items():
            stored.slots[slot].load(tensor)
            stored.slots[slot].settle()
