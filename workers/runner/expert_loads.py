"""What the experts of a model get, read now and then with a step's results.

Every rank routes all tokens, so that what one rank counts is true of all of them.
"""

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from workers.config import EngineConfig
from workers.engine.observer import ExpertRecord
from workers.errors import ConfigError
from workers.layers.moe.mixture import MixtureOfExperts
from workers.layers.moe.tally import ExpertTally
from workers.loading.expert_load_file import write_expert_loads
from workers.parallel.expert_copies import ExpertHolders
from workers.sampling.transfer import start_download

logger = logging.getLogger(__name__)

MIN_WRITE_INTERVAL_S = 60.0

ReadLoad = Callable[[], ExpertRecord]
"""Once the device has passed the place at which it was made."""


class ExpertLoads:
    """holders: of each mixture. file: where the loads are kept, at most once in
    MIN_WRITE_INTERVAL_S; None keeps none. Nobody's request ends for want of it."""

    def __init__(
        self,
        tally: ExpertTally,
        interval_steps: int,
        holders: Sequence[ExpertHolders],
        num_parts: int,
        file: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tally, self._interval_steps, self._file = tally, interval_steps, file
        self._shares = np.stack([_shares(of_mixture, num_parts) for of_mixture in holders])
        self._clock, self._next_write_s = clock, clock()
        self._steps = 0
        self._before = np.zeros(tuple(tally.tokens.shape), dtype=np.int64)

    def after_launch(self) -> ReadLoad | None:
        """Called behind every step's launch. None where nothing is read with this step."""
        self._steps += 1
        if self._steps % self._interval_steps:
            return None
        on_host = start_download(self._tally.tokens)
        return lambda: self._record(on_host.numpy())

    def read_now(self) -> ExpertRecord | None:
        """As after_launch, behind a step that has ended."""
        read = self.after_launch()
        return None if read is None else read()

    def _record(self, tokens: npt.NDArray[np.int64]) -> ExpertRecord:
        """tokens: (mixtures, experts), since the start. Steps are read in their order."""
        new, self._before = tokens - self._before, tokens.copy()
        if self._file is not None and self._clock() >= self._next_write_s:
            self._next_write_s = self._clock() + MIN_WRITE_INTERVAL_S
            try:
                write_expert_loads(self._file, tokens.tolist())
            except OSError as error:
                logger.warning("expert_load_file %s is not written: %s", self._file, error)
        by_part = np.einsum("me,mep->mp", new, self._shares)
        of_parts = by_part.sum(axis=0).round().astype(np.int64)
        return ExpertRecord(tuple(of_parts.tolist()), _busiest(new), _busiest(by_part))


def _shares(holders: ExpertHolders, num_parts: int) -> npt.NDArray[np.float64]:
    """(experts, parts): which part of an expert's tokens a part computes."""
    shares = np.zeros((len(holders.by_expert), num_parts))
    for expert, parts in enumerate(holders.by_expert):
        shares[expert, list(parts)] = 1 / len(parts)
    return shares


def _busiest(tokens: npt.NDArray[np.int64] | npt.NDArray[np.float64]) -> float:
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
    file = None if config.expert_load_file is None else Path(config.expert_load_file).expanduser()
    if file is not None and not file.parent.is_dir():
        raise ConfigError(f"expert_load_file: there is no folder {file.parent}; make it")
    return ExpertLoads(
        ExpertTally(mixtures, device),
        config.expert_load_interval_steps,
        [mixture.experts.holders for mixture in mixtures],
        config.ep_size,
        file,
    )
