"""What is made of a prompt's final states. Knows no tensors and no text."""

from enum import StrEnum

import msgspec

from workers.errors import ErrorCode, RequestRejectedError


class Pooling(StrEnum):
    """LAST: the final state of the prompt's last token. MEAN: the mean over all of its tokens'.
    CLS: the first token's. MAX: of each value the largest. SCORES: no state, but what the head of a
    classifier makes of them, a number a label. Decoders have the first two only."""

    LAST = "last"
    MEAN = "mean"
    CLS = "cls"
    MAX = "max"
    SCORES = "scores"


DECODER_POOLINGS = (Pooling.LAST, Pooling.MEAN)


class Activation(StrEnum):
    """What makes scores of a classifier's logits."""

    NONE = "none"
    SIGMOID = "sigmoid"
    SOFTMAX = "softmax"
    TANH = "tanh"


class PoolingParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """dimensions: how many of the vector's values are kept, from its beginning; None: all.
    is_normalised: what is kept is divided by its Euclidean length; of scores, which are never cut:
    their activation is applied.

    Cut first, then normalised: Kusupati et al., Matryoshka Representation Learning (2022).
    """

    method: Pooling
    dimensions: int | None = None
    is_normalised: bool = True

    def validate(self, embedding_size: int) -> None:
        """embedding_size: of the model, 0 where it gives none. Raises RequestRejectedError."""
        if not embedding_size:
            raise RequestRejectedError(
                ErrorCode.INVALID_REQUEST, "this model gives no embeddings", "model"
            )
        if self.dimensions is not None and not 1 <= self.dimensions <= embedding_size:
            raise RequestRejectedError(
                ErrorCode.INVALID_REQUEST,
                f"dimensions must be in [1, {embedding_size}]",
                "dimensions",
            )


class EmbeddingInfo(msgspec.Struct, frozen=True):
    """Of a model: how many values a vector has before it is cut, and how the model is pooled.
    activation: of a classifier. is_purpose: of a decoder, whether its folder says that vectors are
    what it is for. prompt: what goes before every text, "" for nothing."""

    size: int
    pooling: Pooling
    activation: Activation = Activation.NONE
    is_purpose: bool = False
    prompt: str = ""
