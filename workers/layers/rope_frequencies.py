"""Rotary frequencies: from a model's rope parameters to the angles of every position.

One function for each scaling variant. Results agree with transformers' ROPE_INIT_FUNCTIONS; the
tests hold them to it. Everything is computed once, on the host, in float32. Knows no layer.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """A model's rope parameters.

    rotary_dim: leading elements of a head that are rotated, head_dim times the partial factor.
    max_position_embeddings: as in the model's config. parameters: the scaling variant's own, under
    the names of Hugging Face's rope_parameters.
    """

    rope_type: str
    theta: float
    rotary_dim: int
    max_position_embeddings: int
    parameters: Mapping[str, Any]

    @property
    def original_max_position(self) -> int:
        """Positions of the pretraining, before any stretching."""
        value = self.parameters.get("original_max_position_embeddings")
        return int(value or self.max_position_embeddings)

    @property
    def factor(self) -> float:
        """How many times the context is stretched."""
        value = self.parameters.get("factor")
        return float(value or self.max_position_embeddings / self.original_max_position)


@dataclass(frozen=True, slots=True)
class RopeFrequencies:
    """inv_freq: float32 (rotary_dim / 2,), or (num_positions, rotary_dim / 2) where it depends on
    the position. attention_factor multiplies cos and sin."""

    inv_freq: torch.Tensor
    attention_factor: float = 1.0


def _powers(spec: RopeSpec) -> torch.Tensor:
    """theta ** (2 i / rotary_dim), the wavelengths over 2 pi: float32 (rotary_dim / 2,)."""
    exponents = torch.arange(0, spec.rotary_dim, 2, dtype=torch.float32) / spec.rotary_dim
    return torch.pow(torch.tensor(spec.theta, dtype=torch.float32), exponents)


def _default(spec: RopeSpec, num_positions: int) -> RopeFrequencies:
    """Su et al., 2021 (RoFormer)."""
    return RopeFrequencies(1.0 / _powers(spec))


def _linear(spec: RopeSpec, num_positions: int) -> RopeFrequencies:
    """Position interpolation, Chen et al., 2023: positions shrink by the factor."""
    return RopeFrequencies(1.0 / _powers(spec) / spec.factor)


def _dynamic(spec: RopeSpec, num_positions: int) -> RopeFrequencies:
    """NTK-aware scaling that grows with the position beyond max_position_embeddings.

    Position p takes the base of a sequence of p + 1 tokens, which is what transformers gives a
    token decoded at p over a cache. It depends on nothing but p: not on the rest of the batch and
    not on how the prompt was cut into chunks.
    """
    limit, dim = spec.max_position_embeddings, spec.rotary_dim
    lengths = torch.arange(1, num_positions + 1, dtype=torch.float64).clamp_min(limit)
    growth = spec.factor * lengths / limit - (spec.factor - 1.0)
    base = spec.theta * growth ** (dim / (dim - 2))
    exponents = torch.arange(0, dim, 2, dtype=torch.float64) / dim
    return RopeFrequencies((1.0 / base.unsqueeze(1) ** exponents).float())


def _llama3(spec: RopeSpec, num_positions: int) -> RopeFrequencies:
    """Llama 3.1: long wavelengths are stretched, short ones kept, those between interpolated."""
    low, high = spec.parameters["low_freq_factor"], spec.parameters["high_freq_factor"]
    inv_freq = 1.0 / _powers(spec)
    rotations = spec.original_max_position * inv_freq / (2 * math.pi)
    kept_share = ((rotations - low) / (high - low)).clamp(0.0, 1.0)
    return RopeFrequencies((1 - kept_share) * inv_freq / spec.factor + kept_share * inv_freq)


def yarn_magnitude(scale: float, weight: float) -> float:
    """By how much YaRN lengthens queries and keys of a context stretched by scale."""
    return 0.1 * weight * math.log(scale) + 1.0 if scale > 1 else 1.0


def _yarn_attention_factor(spec: RopeSpec) -> float:
    given = spec.parameters.get("attention_factor")
    if given is not None:
        return float(given)
    mscale, mscale_all = spec.parameters.get("mscale"), spec.parameters.get("mscale_all_dim")
    if mscale and mscale_all:
        return yarn_magnitude(spec.factor, mscale) / yarn_magnitude(spec.factor, mscale_all)
    return yarn_magnitude(spec.factor, 1.0)


def _yarn(spec: RopeSpec, num_positions: int) -> RopeFrequencies:
    """YaRN, Peng et al., 2023: interpolation by frequency, and a factor on the magnitude."""

    def dim_of(num_rotations: float) -> float:
        wavelength = spec.original_max_position / (num_rotations * 2 * math.pi)
        return spec.rotary_dim * math.log(wavelength) / (2 * math.log(spec.theta))

    low = dim_of(spec.parameters.get("beta_fast") or 32)
    high = dim_of(spec.parameters.get("beta_slow") or 1)
    if spec.parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.rotary_dim - 1)
    if low == high:
        high += 0.001  # a ramp of no width would divide by zero
    dims = torch.arange(spec.rotary_dim // 2, dtype=torch.float32)
    stretched_share = ((dims - low) / (high - low)).clamp(0.0, 1.0)
    powers = _powers(spec)
    stretched, kept = 1.0 / (spec.factor * powers), 1.0 / powers
    inv_freq = stretched * stretched_share + kept * (1 - stretched_share)
    return RopeFrequencies(inv_freq, _yarn_attention_factor(spec))


def _longrope_attention_factor(spec: RopeSpec) -> float:
    given = spec.parameters.get("attention_factor")
    if given is not None:
        return float(given)
    if spec.factor <= 1.0:
        return 1.0
    return math.sqrt(1 + math.log(spec.factor) / math.log(spec.original_max_position))


def _longrope(spec: RopeSpec, num_positions: int) -> RopeFrequencies:
    """LongRoPE, Ding et al., 2024: one searched factor a frequency, a short and a long set.

    The set is chosen by the engine's context length, once: keys that were cached under one set
    cannot meet queries of the other.
    """
    is_long = num_positions > spec.original_max_position
    factors = torch.tensor(spec.parameters["long_factor" if is_long else "short_factor"])
    return RopeFrequencies(
        1.0 / (factors.float() * _powers(spec)), _longrope_attention_factor(spec)
    )


_FREQUENCIES: dict[str, Callable[[RopeSpec, int], RopeFrequencies]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
ROPE_TYPES = tuple(_FREQUENCIES)


def rope_frequencies(spec: RopeSpec, num_positions: int) -> RopeFrequencies:
    """Frequencies for positions 0 .. num_positions - 1. spec.rope_type is one of ROPE_TYPES."""
    return _FREQUENCIES[spec.rope_type](spec, num_positions)


def cos_sin_table(spec: RopeSpec, num_positions: int) -> torch.Tensor:
    """float32 (num_positions, rotary_dim): a row is its cosines, then its sines."""
    frequencies = rope_frequencies(spec, num_positions)
    positions = torch.arange(num_positions, dtype=torch.float32).unsqueeze(1)
    angles = positions * frequencies.inv_freq
    return torch.cat((angles.cos(), angles.sin()), dim=-1) * frequencies.attention_factor
