"""Log probabilities of the raw logits: on the device first, as protocol values after the copy.

Raw means before temperature, penalties, bias and masks. Knows no requests.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from workers.engine.logprobs import PackedLogprobs, TokenLogprobs
from workers.sampling.filters import WEIGHT_OF_LIKELIEST, integer_weights
from workers.sampling.transfer import start_download

NO_LOGPROBS = -1

LogitsHead = Callable[[Tensor], Tensor]
"""hidden (m, hidden_size) -> logits (m, vocab_size)."""

MAX_PIECE_BYTES = 128 << 20
"""Of a prompt's logits in float32 at a time. What is made of them takes a few times as much."""


@dataclass(frozen=True, slots=True)
class LogprobTensors:
    """For m positions: the token that stands there, and the num_top likeliest.

    logprobs: float32 (m,). ranks: int64 (m,), 1 + the number of tokens with a higher logit.
    top_token_ids: int64 (m, num_top), top_logprobs: float32 (m, num_top), likeliest first; behind
    them tokens that were asked for by name.
    """

    logprobs: Tensor
    ranks: Tensor
    top_token_ids: Tensor
    top_logprobs: Tensor

    @classmethod
    def joined(cls, pieces: "Sequence[LogprobTensors]") -> "LogprobTensors":
        """Of all positions of pieces with the same num_top, one after the other."""
        return cls(
            torch.cat([piece.logprobs for piece in pieces]),
            torch.cat([piece.ranks for piece in pieces]),
            torch.cat([piece.top_token_ids for piece in pieces]),
            torch.cat([piece.top_logprobs for piece in pieces]),
        )

    def start_download(self) -> "LogprobTensors":
        """Host copies, readable once the device's stream has passed here."""
        return LogprobTensors(
            start_download(self.logprobs),
            start_download(self.ranks),
            start_download(self.top_token_ids),
            start_download(self.top_logprobs),
        )


@dataclass(frozen=True, slots=True)
class SampledLogprobs:
    """Log probabilities of those rows of a batch that asked for them.

    num_top: host int32 (n,) for all rows, NO_LOGPROBS where none were asked. tensors: one position
    per row that asked, in row order, with the largest num_top of them all. num_asked: host int32
    (n,), tokens that a row named and gets instead of its likeliest ones; asked_at: where those of
    every row begin.
    """

    tensors: LogprobTensors
    num_top: npt.NDArray[np.int32]
    num_asked: npt.NDArray[np.int32]
    asked_at: int

    def start_download(self) -> "SampledLogprobs":
        return SampledLogprobs(
            self.tensors.start_download(), self.num_top, self.num_asked, self.asked_at
        )

    def read(self) -> tuple[TokenLogprobs | None, ...]:
        """One entry per row of the batch, from host copies."""
        wanted = self.num_top >= 0
        entries = iter(
            read_logprobs(
                self.tensors, map(self._span, self.num_top[wanted], self.num_asked[wanted])
            )
        )
        return tuple(next(entries) if num >= 0 else None for num in self.num_top.tolist())

    def _span(self, num_top: int, num_asked: int) -> slice:
        return slice(self.asked_at, self.asked_at + num_asked) if num_asked else slice(num_top)


def compute_logprobs(
    logits: Tensor, token_ids: Tensor, num_top: int, asked_ids: Tensor | None = None
) -> LogprobTensors:
    """Log probabilities under float logits (m, vocab) of token_ids int64 (m,); does not sync.

    num_top: 0 or more; capped at vocab. asked_ids: int64 (m, k), more tokens of each position.
    """
    logits = logits.float()
    log_normaliser = _log_normaliser(logits)
    chosen = logits.gather(1, token_ids.unsqueeze(1))
    top_logits, top_token_ids = logits.topk(min(num_top, logits.shape[1]), dim=-1)
    if asked_ids is not None:
        top_logits = torch.cat([top_logits, logits.gather(1, asked_ids)], dim=1)
        top_token_ids = torch.cat([top_token_ids, asked_ids], dim=1)
    return LogprobTensors(
        logprobs=(chosen - log_normaliser).squeeze(1),
        ranks=(logits > chosen).sum(dim=-1) + 1,
        top_token_ids=top_token_ids,
        top_logprobs=top_logits - log_normaliser,
    )


def _log_normaliser(logits: Tensor) -> Tensor:
    """The logarithm of the sum of exp(logits), float32 (m, 1) from (m, vocab), whatever m is. A row
    without a finite maximum has none that means anything."""
    row_max = logits.amax(dim=-1, keepdim=True)
    mass = integer_weights(torch.sub(logits, row_max)).sum(dim=-1, keepdim=True)
    return row_max + (mass.double() / WEIGHT_OF_LIKELIEST).log().float()


def prompt_logprobs(
    head: LogitsHead, hidden: Tensor, target_ids: Tensor, num_top: int, vocab_size: int
) -> LogprobTensors:
    """Log probabilities of prompt tokens: target_ids[j] is what follows the position of hidden[j].

    Position by position the same as `compute_logprobs`. A prompt has many more rows than a batch of
    samples, so that logits are made of a bounded number of rows at a time, and let go of. Ranks of
    a group take the same pieces.
    """
    num_rows = max(1, MAX_PIECE_BYTES // (4 * vocab_size))
    pieces = [
        compute_logprobs(head(piece), piece_ids, num_top)
        for piece, piece_ids in zip(
            torch.split(hidden, num_rows), torch.split(target_ids, num_rows), strict=True
        )
    ]
    return LogprobTensors.joined(pieces)


def pack_logprobs(host: LogprobTensors) -> PackedLogprobs:
    """Protocol values of a prompt's positions from host copies, without an object a position."""
    return PackedLogprobs(
        host.top_token_ids.shape[1],
        host.logprobs.numpy().astype("<f4").tobytes(),
        host.ranks.numpy().astype("<i4").tobytes(),
        host.top_token_ids.numpy().astype("<i4").tobytes(),
        host.top_logprobs.numpy().astype("<f4").tobytes(),
    )


def read_logprobs(host: LogprobTensors, spans: Iterable[slice]) -> tuple[TokenLogprobs, ...]:
    """Protocol values from host copies; a span is what is shown of its position's alternatives."""
    return tuple(
        TokenLogprobs(logprob, rank, top_ids[span], top_values[span])
        for logprob, rank, top_ids, top_values, span in zip(
            host.logprobs.tolist(),
            host.ranks.tolist(),
            host.top_token_ids.tolist(),
            host.top_logprobs.tolist(),
            spans,
            strict=True,
        )
    )
