"""Triton's interpreter rounds to E4M3 as a GPU does: to the nearest value, ties to even.

On its own it adds a rounded bit to the mantissa without a carry: what should become the next power
of two becomes half of it.
"""

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter


def carry_into_exponents() -> None:
    """For float32 that becomes E4M3, from here on. To be called with TRITON_INTERPRET=1."""
    convert = interpreter._convert_float

    def convert_carrying(
        values: np.ndarray, dtype: tl.dtype, wanted: tl.dtype, rounding: object
    ) -> np.ndarray:
        if (dtype, wanted) != (tl.float32, tl.float8e4nv):
            return convert(values, dtype, wanted, rounding)
        exact = torch.from_numpy(np.ascontiguousarray(values).view(np.float32))
        return exact.to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    interpreter._convert_float = convert_carrying
