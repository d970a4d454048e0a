"""Pooled vectors on the host: parts of a prompt become one vector. Knows no request."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from workers.pooling.params import Activation, Pooling, PoolingParams

FloatArray = npt.NDArray[np.float32]

_WIRE = np.dtype("<f4")


class PooledParts:
    """What steps made of a prompt's chunks so far: sums over their tokens, or its last state."""

    def __init__(self, params: PoolingParams) -> None:
        self._params = params
        self._total: FloatArray | None = None

    def clear(self) -> None:
        self._total = None

    def add(self, part: FloatArray) -> None:
        """part: float32 (hidden_size,)."""
        self._total = part if self._total is None else self._total + part

    def finish(self, num_tokens: int) -> FloatArray | None:
        """The vector of a prompt of num_tokens, float32; None where it would hold what is no
        number, as one without a direction does that is to be normalised."""
        params, vector = self._params, self._total
        if vector is None:
            raise ValueError("no part of the prompt has been pooled")
        if params.method is Pooling.MEAN:
            vector = vector / np.float32(num_tokens)
        return finish_vector(vector, params)


def finish_vector(vector: FloatArray, params: PoolingParams) -> FloatArray | None:
    """What is asked for of a pooled vector, float32; None as in PooledParts.finish."""
    vector = vector[: params.dimensions]
    if params.is_normalised:
        vector = _normalised(vector)
    return vector if bool(np.isfinite(vector).all()) else None


def finish_scores(
    logits: FloatArray, params: PoolingParams, activation: Activation
) -> FloatArray | None:
    """A classifier's scores of one text, float32 (num_labels,); None where one is no number."""
    scores = _ACTIVATE[activation](logits) if params.is_normalised else logits
    return scores if bool(np.isfinite(scores).all()) else None


def _normalised(vector: FloatArray) -> FloatArray:
    wide = vector.astype(np.float64)
    length = float(np.sqrt(wide @ wide))
    if length == 0.0:
        return np.full_like(vector, np.nan)
    unit: FloatArray = (wide / length).astype(np.float32)
    return unit


def _sigmoid(logits: FloatArray) -> FloatArray:
    # As tanh it overflows nowhere.
    scores: FloatArray = (0.5 * (1.0 + np.tanh(0.5 * logits.astype(np.float64)))).astype(np.float32)
    return scores


def _softmax(logits: FloatArray) -> FloatArray:
    powers = np.exp(logits.astype(np.float64) - logits.max())
    scores: FloatArray = (powers / powers.sum()).astype(np.float32)
    return scores


_ACTIVATE: dict[Activation, Callable[[FloatArray], FloatArray]] = {
    Activation.NONE: lambda logits: logits,
    Activation.SIGMOID: _sigmoid,
    Activation.SOFTMAX: _softmax,
    Activation.TANH: np.tanh,
}


def pack_vector(vector: FloatArray) -> bytes:
    """Little-endian float32, as it crosses the engine's border."""
    return vector.astype(_WIRE, copy=False).tobytes()


def unpack_vector(packed: bytes) -> FloatArray:
    return np.frombuffer(packed, dtype=_WIRE).astype(np.float32, copy=False)
