"""Names of the functions that gates of feed-forward blocks go through. Computes nothing."""

from typing import Literal

Gate = Literal["silu", "gelu_tanh"]
"""silu: of SwiGLU. gelu_tanh: of GEGLU, with tanh for the error function (Gemma)."""
