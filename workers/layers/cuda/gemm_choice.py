"""Which GEMM for which weights and how many tokens: by measurement, kept in a file.

Measured choices for some GPUs come with the package; others are measured once, when a model first
starts on a machine, and kept in the user's cache folder. Knows shapes, no layer names.
"""

import json
import logging
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

import torch

from workers.layers.cuda.chosen_gemm import Activate, Config, GemmBuilder, Multiply
from workers.layers.cuda.gemm import GemmConfig
from workers.layers.cuda.gemm_candidates import TOKEN_BUCKETS, GemmShape, candidates
from workers.layers.cuda.gemm_measure import Choices, measure
from workers.layers.cuda.lt_gemm import LtConfig

__all__ = [
    "SHIPPED_FOLDER",
    "TOKEN_BUCKETS",
    "Choices",
    "GemmChooser",
    "GemmShape",
    "candidates",
    "dump_choices",
    "read_choices",
]

logger = logging.getLogger(__name__)

SHIPPED_FOLDER = Path(__file__).parent / "tuned"
MAX_MEASURING_SECONDS = 20.0
"""Of all shapes of a model together; what it does not suffice for is measured at later starts."""
MIN_MEASURED_ELEMENTS = 1 << 19
"""Smaller weights are read in the time of a launch: cuBLAS multiplies by them, unmeasured."""
_SIXTEEN_BIT = (torch.bfloat16, torch.float16)
_LT_KIND = "cublaslt"


class GemmChooser:
    """Choices by shape. shipped, cached: JSON files that may be absent; cached is written to.

    known: by the shape's text. What is cached on this machine goes before what is shipped.
    """

    def __init__(self, shipped: Path, cached: Path) -> None:
        self._cached = cached
        self._measured = read_choices(cached)
        self._seconds_left = MAX_MEASURING_SECONDS
        self._builders: dict[torch.device, GemmBuilder] = {}
        self.known = merged(read_choices(shipped), self._measured)

    @classmethod
    def for_device(cls, device: torch.device) -> "GemmChooser":
        """Choices of this GPU model, Triton's and torch's versions apart."""
        name = torch.cuda.get_device_name(device).replace(" ", "_")
        cache = Path.home() / ".cache" / "tessera"
        return cls(SHIPPED_FOLDER / f"{name}.json", cache / f"gemm-{name}-{torch.__version__}.json")

    def choose(self, shape: GemmShape, weights: Sequence[torch.Tensor]) -> Choices:
        """weights: all of a model's that have this shape and one dtype, on the device."""
        is_small = weights[0].numel() < MIN_MEASURED_ELEMENTS
        if weights[0].dtype not in _SIXTEEN_BIT or is_small:
            return {}
        key, builder = str(shape), self._builder(weights[0].device)
        known = _without_stale(self.known.get(key, {}), builder, key)
        missing = [n for n in shape.buckets if n not in known]
        if missing:
            start_s = time.monotonic()
            measured = measure(shape, weights, missing, builder, self._seconds_left)
            new = {bucket: best.config for bucket, best in measured.items()}
            self._seconds_left -= time.monotonic() - start_s
            self._measured[key] = self._measured.get(key, {}) | new
            known |= new
            self._write()
        self.known[key] = known
        return known

    def gemms(self, shape: GemmShape, weights: Sequence[torch.Tensor]) -> dict[int, Multiply]:
        """What multiplies by any of the weights, by bucket; where there is none: cuBLAS."""
        builder = self._builder(weights[0].device)
        return {
            max_tokens: builder.multiply(config, weights[0])
            for max_tokens, config in self._by_bucket(shape, weights).items()
        }

    def gated_gemms(self, shape: GemmShape, weights: Sequence[torch.Tensor]) -> dict[int, Activate]:
        """The same for gated weights, with the activation."""
        builder = self._builder(weights[0].device)
        return {
            max_tokens: builder.activate(config, weights[0])
            for max_tokens, config in self._by_bucket(shape, weights).items()
        }

    def _by_bucket(self, shape: GemmShape, weights: Sequence[torch.Tensor]) -> dict[int, Config]:
        choices = self.choose(shape, weights)
        return {bucket: choices.get(bucket) for bucket in (*TOKEN_BUCKETS, sys.maxsize)}

    def _builder(self, device: torch.device) -> GemmBuilder:
        return self._builders.setdefault(device, GemmBuilder(device))

    def _write(self) -> None:
        self._cached.parent.mkdir(parents=True, exist_ok=True)
        text = dump_choices(self._measured)
        # Ranks of one node measure at the same time: each writes a file of its own.
        partial = self._cached.with_suffix(f".partial-{os.getpid()}")
        partial.write_text(text, encoding="utf-8")
        partial.replace(self._cached)


def _without_stale(choices: Choices, builder: GemmBuilder, key: str) -> Choices:
    """Without algorithms of another version of cuBLASLt than is loaded."""
    if not any(isinstance(config, LtConfig) for config in choices.values()):
        return dict(choices)
    version = builder.library.version
    stale = {
        bucket
        for bucket, config in choices.items()
        if isinstance(config, LtConfig) and config.version != version
    }
    if stale:
        logger.info("gemm %s: choices of another cuBLASLt than %d: %s", key, version, sorted(stale))
    return {bucket: config for bucket, config in choices.items() if bucket not in stale}


def merged(first: Mapping[str, Choices], second: Mapping[str, Choices]) -> dict[str, Choices]:
    """Both; where they differ, the second."""
    return {key: first.get(key, {}) | second.get(key, {}) for key in {**first, **second}}


def dump_choices(choices: Mapping[str, Choices]) -> str:
    """As JSON: shape -> bucket -> the config's kind and fields in order, or null for cuBLAS."""
    table = {
        shape: {str(n): _row(config) for n, config in sorted(by_tokens.items())}
        for shape, by_tokens in choices.items()
    }
    lines = [f"  {json.dumps(shape)}: {json.dumps(row)}" for shape, row in table.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def read_choices(path: Path) -> dict[str, Choices]:
    """What dump_choices wrote; nothing if there is no file."""
    if not path.is_file():
        return {}
    table = json.loads(path.read_text(encoding="utf-8"))
    return {
        shape: {int(n): _config(row) for n, row in by_tokens.items()}
        for shape, by_tokens in table.items()
    }


def _row(config: Config) -> list[Any] | None:
    if isinstance(config, LtConfig):
        return [_LT_KIND, *astuple(config)]
    return None if config is None else list(astuple(config))


def _config(row: list[Any] | None) -> Config:
    if row is None:
        return None
    return LtConfig(*row[1:]) if row[0] == _LT_KIND else GemmConfig(*row)
