"""A feed-forward block in transformers' own code, as a layer of a native model.

Built from the config without a model around it, loaded under the checkpoint's names: transformers
joins the experts of a block in two tensors, checkpoints have three for each expert. Knows no
attention.
"""

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from workers.errors import ModelLoadError
from workers.layers.sharding import ShardContext, ShardedLayer, TensorSource, copy_slice
from workers.models.capture_trial import NUM_TRIAL_TOKENS, capture_obstacle

_GROUPED_ROW_BYTES = 16


class TransformersBlock(ShardedLayer):
    """(n, hidden_size) -> (n, hidden_size), replicated on every rank.

    build: a module class of transformers that takes a config. Parameters have the shard's dtype,
    buffers the one that build gives them: a router's correction stays float32, as in transformers.
    Raises ModelLoadError for a block with buffers that no checkpoint has.
    """

    def __init__(
        self, build: Callable[[Any], nn.Module], config: PreTrainedConfig, shard: ShardContext
    ) -> None:
        super().__init__()
        config = copy.deepcopy(config)
        with torch.device("meta"):
            block = build(config)
        for module in block.modules():
            _allocate(module, shard)
        config._experts_implementation = _experts_implementation(block)
        self.block = block
        self._hidden_size, self._shard = config.hidden_size, shard
        self._targets = _targets_by_checkpoint_name(block)

    def checkpoint_shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tuple(target.shape) for name, target in self._targets.items()}

    def load_shard(self, name_part: str, tensor: TensorSource) -> None:
        target = self._targets[name_part]
        copy_slice(target, tensor, slice(0, target.shape[0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.block(x.unsqueeze(0)).squeeze(0)
        return out

    @torch.inference_mode()
    def capture_obstacle(self) -> str:
        """As CausalLM.capture_obstacle, of the block alone. Grouped products of other types than
        bfloat16 have no kernel and wait for the device."""
        size, device = NUM_TRIAL_TOKENS * self._hidden_size, self._shard.device
        x = torch.linspace(-1.0, 1.0, size, dtype=self._shard.dtype, device=device)
        x = x.view(NUM_TRIAL_TOKENS, self._hidden_size)
        self(x)
        return capture_obstacle(device, partial(self, x), partial(self, -x))


def _experts_implementation(block: nn.Module) -> str:
    """Grouped products are in tensors alone, but take rows of whole 16 bytes; "eager" asks on the
    host which experts were chosen."""
    stacked = [parameter for parameter in block.parameters() if parameter.dim() == 3]
    row_bytes = [parameter.shape[-1] * parameter.itemsize for parameter in stacked]
    is_aligned = all(size % _GROUPED_ROW_BYTES == 0 for size in row_bytes)
    return "grouped_mm" if is_aligned else "eager"


def _allocate(module: nn.Module, shard: ShardContext) -> None:
    """Uninitialised memory for the module's own tensors, which are on the meta device."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        setattr(module, name, shard.empty_parameter(*parameter.shape))
    for name, buffer in list(module.named_buffers(recurse=False)):
        setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype, device=shard.device))


def _targets_by_checkpoint_name(block: nn.Module) -> dict[str, torch.Tensor]:
    """Views of the block's tensors, one for each tensor of the checkpoint."""
    state = block.state_dict()
    unsaved = {name for name, _ in block.named_buffers()} - set(state)
    if unsaved:
        raise ModelLoadError(f"{type(block).__name__} has buffers of its own: {sorted(unsaved)}")
    targets: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        if name == "experts.gate_up_proj":
            for expert, joined in enumerate(tensor):
                gate, up = joined.chunk(2)
                targets[f"experts.{expert}.gate_proj.weight"] = gate
                targets[f"experts.{expert}.up_proj.weight"] = up
        elif name == "experts.down_proj":
            for expert, down in enumerate(tensor):
                targets[f"experts.{expert}.down_proj.weight"] = down
        else:
            targets[name] = tensor
    return targets
