"""What the encoder of an encoder-decoder reads of a request, and which of it a model takes.

msgspec structs with closed types, as in protocol.py: text as token ids, audio as an array of
features in bytes. Knows no model and no tokenizer.
"""

import hashlib
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from workers.errors import ErrorCode, RequestRejectedError

_FEATURE = np.dtype("<f4")


class SourceTokens(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="tokens", tag_field="kind"
):
    """A source text."""

    token_ids: list[int]

    @property
    def max_encoder_tokens(self) -> int:
        """What an encoder makes of it at most."""
        return len(self.token_ids)

    @property
    def digest(self) -> str:
        return _digest(b"tokens", np.array(self.token_ids, dtype="<i8").tobytes())


class SourceFeatures(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="features", tag_field="kind"
):
    """An array of features. values: float32, little-endian, (num_bins, num_frames), row by row."""

    num_bins: int
    num_frames: int
    values: bytes

    @classmethod
    def of(cls, array: npt.NDArray[Any]) -> "SourceFeatures":
        """array: (num_bins, num_frames)."""
        num_bins, num_frames = array.shape
        return cls(num_bins, num_frames, np.ascontiguousarray(array, dtype=_FEATURE).tobytes())

    @property
    def max_encoder_tokens(self) -> int:
        """What an encoder makes of it at most."""
        return self.num_frames

    @property
    def array(self) -> npt.NDArray[np.float32]:
        """float32 (num_bins, num_frames), read-only."""
        flat = np.frombuffer(self.values, dtype=_FEATURE)
        return flat.reshape(self.num_bins, self.num_frames).astype(np.float32, copy=False)

    @property
    def digest(self) -> str:
        return _digest(b"features %d %d" % (self.num_bins, self.num_frames), self.values)


EncoderInput = SourceTokens | SourceFeatures


class DecoderStart(msgspec.Struct, frozen=True):
    """How a model's decoder begins, as its generation config says.

    token_ids: before the first token of its own. excluded_ids: never generated. may_be_empty:
    whether its first token may end the sequence.
    """

    token_ids: tuple[int, ...] = (0,)
    excluded_ids: tuple[int, ...] = ()
    may_be_empty: bool = True


class TextEncoder(msgspec.Struct, frozen=True, tag="text", tag_field="kind"):
    """Takes up to max_tokens ids below vocab_size and makes as many tokens of them."""

    max_tokens: int
    vocab_size: int
    start: DecoderStart = DecoderStart()

    def num_tokens_of(self, source: EncoderInput | None) -> int:
        """How many tokens the encoder will make.

        Raises RequestRejectedError: INVALID_REQUEST or CONTEXT_LENGTH_EXCEEDED.
        """
        if not isinstance(source, SourceTokens):
            raise _rejected("this model's encoder reads the token ids of a source text")
        ids = source.token_ids
        if not ids:
            raise _rejected("the source must have at least one token")
        if len(ids) > self.max_tokens:
            raise RequestRejectedError(
                ErrorCode.CONTEXT_LENGTH_EXCEEDED,
                f"the source has {len(ids)} tokens, this model's encoder takes {self.max_tokens}",
                "encoder_input",
            )
        low, high = min(ids), max(ids)
        if low < 0 or high >= self.vocab_size:
            wrong = low if low < 0 else high
            raise _rejected(f"source token id {wrong} is not in [0, {self.vocab_size})")
        return len(ids)

    def shortest(self) -> EncoderInput:
        """An input for a trial."""
        return SourceTokens([0])

    def longest(self) -> EncoderInput:
        """An input of as many tokens as it takes, for a trial."""
        return SourceTokens([0] * self.max_tokens)


class SpeechTokens(msgspec.Struct, frozen=True):
    """Whisper's tokens that tell its decoder what to do, as far as the model has them.

    languages: by code. previous: before text that came before. no_timestamps: text alone.
    """

    languages: dict[str, int] = {}
    transcribe: int | None = None
    no_timestamps: int | None = None
    previous: int | None = None


class FeatureEncoder(msgspec.Struct, frozen=True, tag="features", tag_field="kind"):
    """Takes features (num_bins, num_frames) and makes max_tokens tokens of them."""

    max_tokens: int
    num_bins: int
    num_frames: int
    start: DecoderStart = DecoderStart()
    speech: SpeechTokens = SpeechTokens()

    def num_tokens_of(self, source: EncoderInput | None) -> int:
        """As TextEncoder.num_tokens_of. Raises RequestRejectedError: INVALID_REQUEST."""
        shape = self.num_bins, self.num_frames
        if not isinstance(source, SourceFeatures):
            raise _rejected(f"this model's encoder reads features of shape {shape}")
        if (source.num_bins, source.num_frames) != shape:
            given = source.num_bins, source.num_frames
            raise _rejected(f"the features have shape {given}, this model's encoder takes {shape}")
        if len(source.values) != self.num_bins * self.num_frames * _FEATURE.itemsize:
            raise _rejected(f"{len(source.values)} bytes are no float32 features of shape {shape}")
        if not np.isfinite(source.array).all():
            raise _rejected("the features must be finite numbers")
        return self.max_tokens

    def shortest(self) -> EncoderInput:
        """An input for a trial."""
        return SourceFeatures.of(np.zeros((self.num_bins, self.num_frames)))

    def longest(self) -> EncoderInput:
        """As TextEncoder.longest; all inputs are of one size."""
        return self.shortest()


EncoderInfo = TextEncoder | FeatureEncoder


def _digest(kind: bytes, content: bytes) -> str:
    digest = hashlib.blake2b(kind + b":", digest_size=16)
    digest.update(content)
    return digest.hexdigest()


def _rejected(message: str) -> RequestRejectedError:
    return RequestRejectedError(ErrorCode.INVALID_REQUEST, message, "encoder_input")
