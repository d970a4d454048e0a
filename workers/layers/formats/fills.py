"""What dummy weights have in the tensors of a format: products of the size that noise has.

The matrices they stand for have a standard deviation of about 0.02.
"""

from collections.abc import Callable

import torch

from workers.layers.sharding import DUMMY_STD

Fill = Callable[[torch.Tensor, torch.Generator], None]

_FP8_STD = 64.0
_INT8_STD = 74.0  # of integers spread evenly over [-128, 127]
_INT4_SCALE = 9 / 2048  # times 4.6, of integers over [0, 15]: about DUMMY_STD
_NUM_INT32 = 1 << 32


def noise(target: torch.Tensor, generator: torch.Generator) -> None:
    """Normal, of DUMMY_STD."""
    target.normal_(0.0, DUMMY_STD, generator=generator)


def fp8_noise(target: torch.Tensor, generator: torch.Generator) -> None:
    """Normal, of _FP8_STD, rounded to FP8."""
    values = torch.empty(target.shape, dtype=torch.float32, device=target.device)
    target.copy_(values.normal_(0.0, _FP8_STD, generator=generator).clamp_(-448.0, 448.0))


def bits(target: torch.Tensor, generator: torch.Generator) -> None:
    """Every bit of an integer tensor by chance."""
    span = 1 << (8 * target.element_size())
    low = torch.iinfo(target.dtype).min
    values = torch.empty(target.shape, dtype=torch.int64, device=target.device)
    target.copy_(values.random_(low, low + span, generator=generator))


def constant(value: float) -> Fill:
    """The same value everywhere."""

    def fill(target: torch.Tensor, generator: torch.Generator) -> None:
        target.fill_(value)

    return fill


FP8_SCALE = constant(DUMMY_STD / _FP8_STD)
INT8_SCALE = constant(DUMMY_STD / _INT8_STD)
INT4_SCALE = constant(_INT4_SCALE)
"""A number of 16 bits of either kind, as checkpoints' are: kept weights hold others in 32."""
