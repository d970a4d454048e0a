"""Which GEMM for which weights and how many tokens: by measurement, kept in a file.

Measured choices for some GPUs come with the package; others are measured when a model first starts
on a machine and, what that leaves, while its engine is idle. They are kept in the user's cache
folder for the next start. Until then a like GPU's choice serves. Knows shapes, no layer names.
"""

import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import torch

from workers.layers.gate import Gate
from workers.layers.gemm.build import Activate, GemmBuilder, Multiply
from workers.layers.gemm.configs import (
    TOKEN_BUCKETS,
    Choices,
    Config,
    GemmConfig,
    GemmShape,
    LtConfig,
)
from workers.layers.gemm.cublaslt import CublasLtUnavailableError
from workers.layers.gemm.device_limits import DeviceLimits
from workers.layers.gemm.measure import Contest, Measured, Race, in_order, measure
from workers.layers.gemm.table import (
    SHIPPED_FOLDER,
    Tables,
    cached_path,
    keep_choices,
    kept_choices,
    merged,
    shipped_tables,
)

logger = logging.getLogger(__name__)

MAX_MEASURING_SECONDS = 20.0
"""Of all shapes of a model together, at its start; the rest is measured while it is idle."""
MIN_MEASURED_ELEMENTS = 1 << 19
"""Smaller weights are read in the time of a launch: cuBLAS multiplies by them, unmeasured."""
_SIXTEEN_BIT = (torch.bfloat16, torch.float16)


class GemmChooser:
    """Choices by shape. tables: what is shipped; cached: a file, which may be absent, to keep what
    is measured in.

    known: by the shape's text. What is cached on this machine goes before what is shipped.
    """

    def __init__(self, tables: Tables, cached: Path, limits: DeviceLimits) -> None:
        self._cached = cached
        self._limits = limits
        self._guessed = tables.guessed
        self._seconds_left = MAX_MEASURING_SECONDS
        self._builders: dict[torch.device, GemmBuilder] = {}
        self._unmeasured: list[tuple[Contest, int]] = []
        self._race: Race | None = None
        self.known = merged(tables.known, kept_choices(cached))

    @classmethod
    def for_device(cls, device: torch.device) -> Self:
        """Choices of this GPU model, Triton's and torch's versions apart."""
        name, limits = torch.cuda.get_device_name(device), DeviceLimits.of(device)
        tables = shipped_tables(SHIPPED_FOLDER, name, limits.compute_capability)
        folder = Path.home() / ".cache" / "tessera"
        return cls(tables, cached_path(folder, name, torch.__version__), limits)

    def choose(self, shape: GemmShape, weights: Sequence[torch.Tensor]) -> Choices:
        """weights: all of a model's that have this shape and one dtype, on the device."""
        is_small = weights[0].numel() < MIN_MEASURED_ELEMENTS
        if weights[0].dtype not in _SIXTEEN_BIT or is_small:
            return {}
        key, builder = str(shape), self._builder(weights[0].device)
        known = self._usable(self.known.get(key, {}), shape, builder)
        guess = self._usable(self._guessed.get(key, {}), shape, builder)
        missing = [n for n in shape.buckets if n not in known]
        if missing:
            contest = Contest(shape, weights, guess)
            start_s = time.monotonic()
            known |= self._keep(shape, measure(contest, missing, builder, self._seconds_left))
            self._seconds_left -= time.monotonic() - start_s
            left = [bucket for bucket in missing if bucket not in known]
            self._unmeasured += [(contest, bucket) for bucket in in_order(left)]
        self.known[key] = known
        return guess | known

    def measure_next(self) -> bool:
        """Time one candidate of what the start left unmeasured, for the next start.

        Whether there was anything to do. Waits for the device.
        """
        try:
            if self._race is None:
                if not self._unmeasured:
                    return False
                contest, bucket = self._unmeasured.pop(0)
                self._race = Race(contest.trial(bucket, self._builder(contest.weights[0].device)))
            elif not self._race.time_next():
                trial = self._race.trial
                best = self._race.finish()
                self._race = None
                self._keep(trial.shape, {trial.num_tokens: best})
        except torch.OutOfMemoryError as error:
            logger.warning("no memory to measure GEMMs beside the model: %s", error)
            self._race = None
            self._unmeasured.clear()
            return False
        return True

    def gemms(self, shape: GemmShape, weights: Sequence[torch.Tensor]) -> dict[int, Multiply]:
        """What multiplies by any of the weights, by bucket; where there is none: cuBLAS."""
        builder = self._builder(weights[0].device)
        return {
            max_tokens: builder.multiply(config, weights[0])
            for max_tokens, config in self._by_bucket(shape, weights).items()
        }

    def gated_gemms(
        self, shape: GemmShape, weights: Sequence[torch.Tensor], gate: Gate
    ) -> dict[int, Activate]:
        """The same for gated weights, with the activation."""
        builder = self._builder(weights[0].device)
        return {
            max_tokens: builder.activate(config, weights[0], gate)
            for max_tokens, config in self._by_bucket(shape, weights).items()
        }

    def _by_bucket(self, shape: GemmShape, weights: Sequence[torch.Tensor]) -> dict[int, Config]:
        choices = self.choose(shape, weights)
        return {bucket: choices.get(bucket) for bucket in (*TOKEN_BUCKETS, sys.maxsize)}

    def _builder(self, device: torch.device) -> GemmBuilder:
        return self._builders.setdefault(device, GemmBuilder(device, self._limits))

    def _keep(self, shape: GemmShape, measured: dict[int, Measured]) -> Choices:
        """The choices, which are kept in the file."""
        new = {bucket: best.config for bucket, best in measured.items()}
        if new:
            keep_choices(self._cached, {str(shape): new})
        return new

    def _usable(self, choices: Choices, shape: GemmShape, builder: GemmBuilder) -> Choices:
        """Those that this device and the loaded cuBLASLt can compute."""
        return _without_stale(
            {
                bucket: config
                for bucket, config in choices.items()
                if not isinstance(config, GemmConfig)
                or config.fits(bucket, shape.in_features, self._limits)
            },
            builder,
            str(shape),
        )


def _without_stale(choices: Choices, builder: GemmBuilder, key: str) -> Choices:
    """Without algorithms of another version of cuBLASLt than is loaded."""
    if not any(isinstance(config, LtConfig) for config in choices.values()):
        return dict(choices)
    try:
        version = builder.library.version
    except CublasLtUnavailableError as error:
        logger.warning("gemm %s: choices of cuBLASLt are of no use: %s", key, error)
        version = None
    stale = {
        bucket
        for bucket, config in choices.items()
        if isinstance(config, LtConfig) and config.version != version
    }
    if stale:
        logger.info("gemm %s: choices of another cuBLASLt than %s: %s", key, version, sorted(stale))
    return {bucket: config for bucket, config in choices.items() if bucket not in stale}
