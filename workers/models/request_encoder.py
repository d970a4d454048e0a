"""What the runner asks of a model that has an encoder beside its decoder."""

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch

from workers.engine.encoder_input import EncoderInfo, EncoderInput


class EncoderKV(NamedTuple):
    """What a decoder's layer sees of a request's encoder: k (n, kv_heads, head_dim) and v (n,
    kv_heads, v_head_dim), n as EncoderInfo.num_tokens_of says."""

    layer_id: int
    k: torch.Tensor
    v: torch.Tensor


class RequestEncoder(Protocol):
    """Reads one request's input as a whole: every token sees every other one."""

    @property
    def info(self) -> EncoderInfo: ...

    def encode(self, source: EncoderInput) -> Iterator[EncoderKV]:
        """source: one that info takes. Yields every layer of the decoder that sees the encoder."""
