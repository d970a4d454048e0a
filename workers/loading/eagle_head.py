"""An EAGLE-3 head of a checkpoint in the layout of EAGLE's own repository or of SpecForge.

Reads config.json and safetensors strictly: what is missing, unknown, of another shape or for
another target is an error that names it. Knows no KV memory.
"""

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from attention.kernels.providers import probe_triton
from workers.config import EngineConfig
from workers.errors import ConfigError, ModelLoadError
from workers.layers.formats.layer import StoredTensors, unquantised
from workers.layers.sharding import ShardContext
from workers.loading.checkpoint import SafetensorsCheckpoint
from workers.loading.draft_head import LoadedHead
from workers.loading.loader import LoadedModel
from workers.loading.model_folder import architecture_of, read_hf_config
from workers.loading.rounded_drafter import draft_recipe, multiply_as_kept, rounded
from workers.loading.weights import check_shapes, fill_with_noise, shown
from workers.models.eagle_head import NUM_TAPS, EagleHead, EagleSpec, kernel_obstacle
from workers.models.llama_family import llama_family_spec

logger = logging.getLogger(__name__)

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLM")
"""As SpecForge, servers and EAGLE's own repository name it."""
_EMBEDDING = "embed_tokens.weight"
_TO_TARGET, _FROM_TARGET = "d2t", "t2d"
_OTHER_HEADS = (
    *("fc_norm", "norm_output", "norm_before_residual", "norm_before_fc", "use_moe"),
    *("sliding_window", "use_sliding_window", "eagle_aux_hidden_state_layer_ids"),
)
"""Keys of config.json that make a head another one than is served; a falsy value does not."""


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """spec: of the model. tap_layers: behind which layers of the target states are taken."""

    spec: EagleSpec
    tap_layers: tuple[int, ...]


def read_head_config(folder: Path, num_target_layers: int) -> HeadConfig:
    """Raises ModelLoadError for what is no head that can be served, ConfigError where neither the
    folder nor the target's number of layers says which of them to tap."""
    config: Any = read_hf_config(folder)
    if architecture_of(config) not in ARCHITECTURES:
        raise ModelLoadError(
            f"{folder} is of {architecture_of(config)}; EAGLE-3 heads are of "
            f"{', '.join(ARCHITECTURES)}"
        )
    layer = llama_family_spec(config)
    if len(layer.layers) != 1:
        raise ModelLoadError(f"{folder} has {len(layer.layers)} layers, an EAGLE-3 head has one")
    for key in _OTHER_HEADS:
        if getattr(config, key, None):
            raise ModelLoadError(f"{folder}: heads with {key} are not served")
    draft_vocab_size = getattr(config, "draft_vocab_size", None) or layer.vocab_size
    if type(draft_vocab_size) is not int or not 0 < draft_vocab_size <= layer.vocab_size:
        raise ModelLoadError(
            f"{folder}: draft_vocab_size={draft_vocab_size!r} is no part of a vocabulary of "
            f"{layer.vocab_size}"
        )
    spec = EagleSpec(
        layer=layer,
        target_hidden_size=getattr(config, "target_hidden_size", None) or layer.hidden_size,
        draft_vocab_size=draft_vocab_size,
    )
    stated = _stated_taps(folder, config)
    return HeadConfig(spec, stated or _usual_taps(folder, num_target_layers))


def _stated_taps(folder: Path, config: Any) -> tuple[int, ...]:
    """() for a config that says nothing of them."""
    eagle = getattr(config, "eagle_config", None) or {}
    if not isinstance(eagle, dict):
        raise ModelLoadError(f"{folder}: eagle_config is no object")
    stated = eagle.get("eagle_aux_hidden_state_layer_ids")
    if stated is None:
        return ()
    are_layers = isinstance(stated, list) and all(type(layer) is int for layer in stated)
    if not are_layers or len(stated) != NUM_TAPS or sorted(set(stated)) != stated:
        raise ModelLoadError(
            f"{folder}: eagle_aux_hidden_state_layer_ids are {NUM_TAPS} ascending layers, not "
            f"{stated}"
        )
    return tuple(stated)


def _usual_taps(folder: Path, num_layers: int) -> tuple[int, ...]:
    """Behind the layers that EAGLE's own repository taps: an early, the middle and a late one."""
    taps = (1, num_layers // 2 - 1, num_layers - 4)
    if sorted(set(taps)) != list(taps):
        raise ConfigError(
            f"{folder} names no layers to tap, and a target of {num_layers} has none in the usual "
            "places; set eagle_config.eagle_aux_hidden_state_layer_ids in its config.json"
        )
    return taps


def load_head(
    config: EngineConfig, folder: Path, target: LoadedModel, shard: ShardContext
) -> LoadedHead:
    """This rank's share of the head, for the target, which hands over its states from here on.

    Rounded where config.draft_quantization says so. Raises ModelLoadError for a folder without such
    a head, ConfigError for one that is not the target's, or that is to be rounded and is quantised.
    """
    if not folder.is_dir():
        raise ModelLoadError(
            f"{str(folder)!r} is neither builtin-head nor a folder with an EAGLE-3 head"
        )
    embedding = target.model.input_embedding()
    head_config = read_head_config(folder, target.model.geometry.num_layers)
    _check_target(folder, head_config.spec, target, embedding.shape[1])
    try:
        target.model.tap_layers(head_config.tap_layers)
    except ValueError as error:
        raise ConfigError(f"{folder} and {target.facts.name}: {error}") from error
    recipe = draft_recipe(config, folder)
    head_class = head_class_for(head_config.spec, shard.device)
    shard = replace(shard, has_formats=recipe is not None)
    head = head_class(head_config.spec, target.facts.max_context_len, shard)
    stored = unquantised(head) if recipe is None else rounded(recipe, head, config, shard)
    if config.load_format == "dummy":
        fill_with_noise(stored, shard, config.dummy_weights_seed, lambda done, total: None)
    else:
        _fill(folder, head, head_config.spec, stored, embedding)
    if recipe is not None:
        multiply_as_kept(head, shard.device)
    return LoadedHead(
        head.eval(),
        head_config.spec.layer.hidden_size,
        target.facts.max_context_len,
        shard.dtype,
        shard.device,
        num_taps=NUM_TAPS,
    )


def head_class_for(spec: EagleSpec, device: torch.device) -> type[EagleHead]:
    """By fused kernels on a CUDA device, if they cover the head; where not, the log says why."""
    if device.type != "cuda":
        return EagleHead
    obstacle = kernel_obstacle(spec.layer) or probe_triton().missing
    if obstacle:
        logger.info("the EAGLE-3 head runs without fused kernels: %s", obstacle)
        return EagleHead
    # Triton comes with torch for CUDA only.
    from workers.models.cuda_eagle_head import CudaEagleHead

    return CudaEagleHead


def _check_target(folder: Path, spec: EagleSpec, target: LoadedModel, hidden_size: int) -> None:
    facts = target.facts
    for what, own, others in (
        ("vocabulary", spec.layer.vocab_size, facts.vocab_size),
        ("hidden size", spec.target_hidden_size, hidden_size),
    ):
        if own != others:
            raise ConfigError(f"{folder} is for a target with a {what} of {own}, not of {others}")


def _fill(
    folder: Path, head: EagleHead, spec: EagleSpec, stored: StoredTensors, embedding: nn.Parameter
) -> None:
    """stored: of the head. embedding: the target's, for a head that has none of its own."""
    checkpoint = SafetensorsCheckpoint(folder, keeps_names=True)
    if _EMBEDDING not in checkpoint.names:
        if spec.target_hidden_size != spec.layer.hidden_size:
            raise ModelLoadError(f"{folder} lacks {_EMBEDDING}, and the target's has another size")
        del stored.slots[_EMBEDDING]
        head.embed_tokens.weight = embedding
    maps = {_TO_TARGET, _FROM_TARGET} & checkpoint.names
    _check_names(folder, stored, checkpoint.names - maps)
    with checkpoint.opened(stored.slots) as tensors:
        check_shapes(stored.slots, tensors)
        for name, slot in stored.slots.items():
            slot.load(tensors[name])
            slot.settle()
    if maps or spec.draft_vocab_size != spec.layer.vocab_size:
        head.target_ids.copy_(_target_ids(folder, checkpoint, spec))


def _check_names(folder: Path, stored: StoredTensors, names: set[str]) -> None:
    missing, unknown = set(stored.slots) - names, names - set(stored.slots)
    if missing:
        raise ModelLoadError(f"{folder} lacks {len(missing)} tensors: {shown(missing)}")
    if unknown:
        raise ModelLoadError(
            f"{folder} has {len(unknown)} tensors that no EAGLE-3 head has: {shown(unknown)}"
        )


def _target_ids(folder: Path, checkpoint: SafetensorsCheckpoint, spec: EagleSpec) -> torch.Tensor:
    """d2t: by how much the target's id of a token exceeds the head's. t2d: which of the target's
    tokens the head has. Each says what the other one does."""
    for name, size in (
        (_TO_TARGET, spec.draft_vocab_size),
        (_FROM_TARGET, spec.layer.vocab_size),
    ):
        if name not in checkpoint.names:
            raise ModelLoadError(f"{folder} lacks {name}")
        shape = tuple(checkpoint.read(name).shape)
        if shape != (size,):
            raise ModelLoadError(f"{folder}: {name} has shape {shape}, the config says {(size,)}")
    own = torch.arange(spec.draft_vocab_size)
    target_ids = own + checkpoint.read(_TO_TARGET).long()
    known = checkpoint.read(_FROM_TARGET).bool().nonzero().flatten()
    if not torch.equal(target_ids.sort().values, known):
        raise ModelLoadError(f"{folder}: d2t and t2d name different tokens")
    return target_ids
