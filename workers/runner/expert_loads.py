"""What the experts of a model get, read now and then with a step's results.

Every rank routes all tokens, so that what one rank counts is true of all of them.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from workers.config import EngineConfig
from workers.engine.observer import ExpertRecord
from workers.errors import ConfigError
from workers.layers.moe.mixture import MixtureOfExperts
from workers.layers.moe.tally import ExpertTally
from workers.sampling.transfer import start_download

ReadLoad = Callable[[], ExpertRecord]
"""Once the device has passed the place at which it was made."""


class ExpertLoads:
    """num_parts: of the ranks, each with as many experts of its own, in order."""

    def __init__(self, tally: ExpertTally, interval_steps: int, num_parts: int) -> None:
        self._tally, self._interval_steps, self._num_parts = tally, interval_steps, num_parts
        self._steps = 0
        self._before = np.zeros(tuple(tally.tokens.shape), dtype=np.int64)

    def after_launch(self) -> ReadLoad | None:
        """Called behind every step's launch. None where nothing is read with this step."""
        self._steps += 1
        if self._steps % self._interval_steps:
            return None
        on_host = start_download(self._tally.tokens)
        return lambda: self._record(on_host.numpy())

    def _record(self, tokens: npt.NDArray[np.int64]) -> ExpertRecord:
        """tokens: (mixtures, experts), since the start. Steps are read in their order."""
        new, self._before = tokens - self._before, tokens.copy()
        by_part = new.reshape(len(new), self._num_parts, -1).sum(axis=2)
        return ExpertRecord(tuple(by_part.sum(axis=0).tolist()), _busiest(new), _busiest(by_part))


def _busiest(tokens: npt.NDArray[np.int64]) -> float:
    """(mixtures, n) -> how many times the mean the busiest of n gets, a mean over mixtures."""
    means = tokens.mean(axis=1)
    if not means.all():
        return 0.0
    return float((tokens.max(axis=1) / means).mean())


def expert_loads(
    config: EngineConfig, model: nn.Module, device: torch.device
) -> ExpertLoads | None:
    """None where nobody asked. Raises ConfigError where there is nothing to count."""
    if config.expert_load_interval_steps == 0:
        return None
    mixtures = [module for module in model.modules() if isinstance(module, MixtureOfExperts)]
    if not mixtures:
        raise ConfigError(
            "expert_load_interval_steps counts tokens of experts in native models, and this model "
            "has none there; leave it out"
        )
    tally = ExpertTally(mixtures, device)
    return ExpertLoads(tally, config.expert_load_interval_steps, config.ep_size)
