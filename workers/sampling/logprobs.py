"""Log probabilities of the raw logits: on the device first, as protocol values after the copy.

Raw means before temperature, penalties, bias and masks. Knows no requests.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from workers.protocol import TokenLogprobs
from workers.sampling.transfer import start_download

NO_LOGPROBS = -1

_PROMPT_CHUNK_ROWS = 256


@dataclass(frozen=True, slots=True)
class LogprobTensors:
    """For m positions: the token that stands there, and the num_top likeliest.

    logprobs: float32 (m,). ranks: int64 (m,), 1 + the number of tokens with a higher logit.
    top_token_ids: int64 (m, num_top), top_logprobs: float32 (m, num_top), likeliest first.
    """

    logprobs: Tensor
    ranks: Tensor
    top_token_ids: Tensor
    top_logprobs: Tensor

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
    per row that asked, in row order, with the largest num_top of them all.
    """

    tensors: LogprobTensors
    num_top: npt.NDArray[np.int32]

    def start_download(self) -> "SampledLogprobs":
        return SampledLogprobs(self.tensors.start_download(), self.num_top)

    def read(self) -> tuple[TokenLogprobs | None, ...]:
        """One entry per row of the batch, from host copies."""
        asked = read_logprobs(self.tensors, self.num_top[self.num_top >= 0].tolist())
        entries = iter(asked)
        return tuple(next(entries) if num >= 0 else None for num in self.num_top.tolist())


def compute_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> LogprobTensors:
    """Log probabilities under float logits (m, vocab) of token_ids int64 (m,); does not sync.

    num_top: 0 or more; capped at vocab.
    """
    logits = logits.float()
    log_normaliser = logits.logsumexp(dim=-1, keepdim=True)
    chosen = logits.gather(1, token_ids.unsqueeze(1))
    top_logits, top_token_ids = logits.topk(min(num_top, logits.shape[1]), dim=-1)
    return LogprobTensors(
        logprobs=(chosen - log_normaliser).squeeze(1),
        ranks=(logits > chosen).sum(dim=-1) + 1,
        top_token_ids=top_token_ids,
        top_logprobs=top_logits - log_normaliser,
    )


def prompt_logprobs(logits: Tensor, target_ids: Tensor, num_top: int) -> LogprobTensors:
    """Log probabilities of prompt tokens: target_ids[j] is what follows the position of logits[j].

    Position by position the same as `compute_logprobs`, but each takes its own float32 copy of one
    bounded chunk of rows only, since a prompt has many more rows than a batch of samples.
    """
    chunks = [
        compute_logprobs(chunk_logits, chunk_ids, num_top)
        for chunk_logits, chunk_ids in zip(
            torch.split(logits, _PROMPT_CHUNK_ROWS),
            torch.split(target_ids, _PROMPT_CHUNK_ROWS),
            strict=True,
        )
    ]
    return LogprobTensors(
        torch.cat([chunk.logprobs for chunk in chunks]),
        torch.cat([chunk.ranks for chunk in chunks]),
        torch.cat([chunk.top_token_ids for chunk in chunks]),
        torch.cat([chunk.top_logprobs for chunk in chunks]),
    )


def read_logprobs(host: LogprobTensors, num_top: Sequence[int]) -> tuple[TokenLogprobs, ...]:
    """Protocol values from host copies; num_top[i] cuts the top list of position i."""
    return tuple(
        TokenLogprobs(logprob, rank, top_ids[:num], top_values[:num])
        for logprob, rank, top_ids, top_values, num in zip(
            host.logprobs.tolist(),
            host.ranks.tolist(),
            host.top_token_ids.tolist(),
            host.top_logprobs.tolist(),
            num_top,
            strict=True,
        )
    )
