"""What a rank on CPU gives back while its engine sleeps, and how it gets it again.

KV memory and states are forgotten; weights stay in host memory (level 1) or are read anew at wake
(level 2). All tensors stay where they are: only the memory behind them goes.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from workers.config import EngineConfig
from workers.loading.loader import load_model
from workers.loading.weights import OnProgress
from workers.parallel.group import SingleRank
from workers.runner.host_memory import IS_SUPPORTED, give_back
from workers.speculation.config import METHODS_BESIDE

Load = Callable[[OnProgress], nn.Module]


def rest_obstacle(config: EngineConfig, device: torch.device, has_encoder: bool) -> str:
    """Why an engine cannot sleep; "" where it can."""
    if device.type != "cpu":
        return "on GPUs, where graphs hold addresses of weights, no memory is given back yet"
    if not IS_SUPPORTED:
        return "memory is given back on Linux only"
    if config.tp_size > 1:
        return "it runs on several ranks"
    if config.speculation is not None and config.speculation.method in METHODS_BESIDE:
        return f"speculative={config.speculative!r} has a model of its own"
    return "it keeps what an encoder made" if has_encoder else ""


class HostRest:
    """kept: pools of KV memory and states. weights: by name, as they were loaded. load: the same
    model anew."""

    def __init__(
        self, kept: Sequence[torch.Tensor], weights: Mapping[str, torch.Tensor], load: Load
    ) -> None:
        self._kept = tuple(kept)
        # Others are pages of a file, which the system takes by itself.
        self._weights = {
            name: tensor for name, tensor in weights.items() if tensor.untyped_storage().resizable()
        }
        self._load = load
        self._has_weights = True
        self.level = 0

    def release(self, level: int) -> None:
        """level: 1, or 2 for the weights, too. Raises OSError where the system refuses."""
        for tensor in self._kept:
            give_back(tensor.untyped_storage())
        if level > 1 and self._has_weights:
            self._has_weights = False
            for tensor in self._weights.values():
                give_back(tensor.untyped_storage())
        self.level = level

    def restore(self, on_progress: OnProgress) -> None:
        """Raises what loading raises, KeyError or RuntimeError where another model is there now."""
        if not self._has_weights:
            self._read(on_progress)
        self.level = 0

    def _read(self, on_progress: OnProgress) -> None:
        fresh = named_tensors(self._load(on_progress))
        with torch.inference_mode():
            for name, tensor in self._weights.items():
                # One by one: never are both whole.
                tensor.copy_(fresh.pop(name))
        self._has_weights = True


def model_again(
    config: EngineConfig, device: torch.device, dtype: torch.dtype, on_progress: OnProgress
) -> nn.Module:
    """A Load of what one rank has."""
    return load_model(config, SingleRank(), device, dtype, on_progress).model


def named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers, what is tied once."""
    return {
        **{name: parameter.data for name, parameter in model.named_parameters()},
        **dict(model.named_buffers()),
    }
