"""What the host remembers of each slot's sampling parameters, and which path each row takes.

Knows no tensors: from these copies the sampler picks its path without asking the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from workers.sampling.logprobs import NO_LOGPROBS
from workers.sampling.noise import mix_seeds, row_keys
from workers.sampling.params import SamplingParams
from workers.scheduler.plan import AdmittedRequest, IntArray

MAX_CANDIDATE_TOP_K = 64
"""A random row with top_k up to this many draws among its likeliest tokens only."""

RowIndices = npt.NDArray[np.int64]
NO_ROWS: RowIndices = np.empty(0, dtype=np.int64)


class RowUse(IntEnum):
    """What a row needs. A row with neither CANDIDATES nor DENSE is greedy.

    CANDIDATES: random with a small top_k, other filters included. DENSE: random over the whole
    vocabulary; MIN_P, TOP_K and TOP_P are filters of DENSE rows only.
    """

    CANDIDATES = 0
    DENSE = 1
    MIN_P = 2
    TOP_K = 3
    TOP_P = 4
    PENALTIES = 5
    LOGIT_BIAS = 6
    MIN_TOKENS = 7
    LOGPROBS = 8
    ALLOWED = 9
    BAD_WORDS = 10


LOOKING_BACK = (RowUse.PENALTIES, RowUse.BAD_WORDS)
"""What depends on the tokens before."""
DENSE_FILTERS = (RowUse.MIN_P, RowUse.TOP_K, RowUse.TOP_P)

_BITS = tuple(1 << use for use in RowUse)
_DENSE_BIT = 1 << RowUse.DENSE
_MIN_TOKENS_BIT = 1 << RowUse.MIN_TOKENS
_FILTER_BITS = sum(1 << use for use in DENSE_FILTERS)


@dataclass(frozen=True, slots=True)
class HostRows:
    """The rows of one step, on the host.

    slots: int64 (n,). noise_keys: int32 (n, 2). rows: for each use that occurs, its rows,
    ascending; rows of a filter are counted among the DENSE ones. num_top: int32 (n,), NO_LOGPROBS
    where a row asked for none. num_asked: int32 (n,), how many tokens it named instead.
    """

    slots: RowIndices
    noise_keys: npt.NDArray[np.int32]
    rows: dict[RowUse, RowIndices]
    num_top: npt.NDArray[np.int32]
    num_asked: npt.NDArray[np.int32]

    def part(self, start: int, end: int) -> "HostRows":
        """The rows from start up to end, counted from there."""
        if (start, end) == (0, len(self.slots)):
            return self
        first_dense, end_dense = np.searchsorted(self.rows.get(RowUse.DENSE, NO_ROWS), (start, end))
        rows = {}
        for use, all_rows in self.rows.items():
            is_of_dense = use in DENSE_FILTERS
            low, high = (first_dense, end_dense) if is_of_dense else (start, end)
            first, behind = np.searchsorted(all_rows, (low, high))
            if first < behind:
                rows[use] = all_rows[first:behind] - low
        return HostRows(
            self.slots[start:end],
            self.noise_keys[start:end],
            rows,
            self.num_top[start:end],
            self.num_asked[start:end],
        )


class SlotParameters:
    """Host copies per slot: uses as bits, mixed seed, end of the min_tokens mask, logprobs."""

    def __init__(self, max_running_requests: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._uses = np.zeros(max_running_requests, dtype=np.uint16)
        self._mixed_seeds = np.zeros(max_running_requests, dtype=np.uint64)
        self._min_seq_lens = np.zeros(max_running_requests, dtype=np.int64)
        self._num_top = np.full(max_running_requests, NO_LOGPROBS, dtype=np.int32)
        self._num_asked = np.zeros(max_running_requests, dtype=np.int32)

    def admit(self, requests: Sequence[AdmittedRequest]) -> None:
        slots = [request.slot for request in requests]
        samplings = [request.sampling for request in requests]
        self._uses[slots] = [row_uses(sampling, self._vocab_size) for sampling in samplings]
        self._mixed_seeds[slots] = mix_seeds([request.seed for request in requests])
        self._min_seq_lens[slots] = [
            request.num_prompt_tokens + request.sampling.min_tokens for request in requests
        ]
        self._num_top[slots] = [
            NO_LOGPROBS if sampling.logprobs is None else sampling.logprobs
            for sampling in samplings
        ]
        self._num_asked[slots] = [len(sampling.logprob_token_ids) for sampling in samplings]

    def describe(
        self, slots: IntArray, seq_lens: IntArray, void: RowIndices = NO_ROWS
    ) -> HostRows | None:
        """How the rows of one step are to be sampled; None if all are plainly greedy. void: rows
        that nothing is done for, whatever their slots ask."""
        uses = self._uses[slots]
        if len(void):
            uses[void] = 0
        union = int(np.bitwise_or.reduce(uses))
        if union & _MIN_TOKENS_BIT:
            is_over = seq_lens >= self._min_seq_lens[slots]
            uses = uses & ~(is_over.astype(np.uint16) * np.uint16(_MIN_TOKENS_BIT))
            union = int(np.bitwise_or.reduce(uses))
        if union == 0:
            return None
        uses_of_dense = uses[(uses & _DENSE_BIT) != 0]
        rows = {
            use: ((uses_of_dense if bit & _FILTER_BITS else uses) & bit).nonzero()[0]
            for use, bit in zip(RowUse, _BITS, strict=True)
            if union & bit
        }
        num_top, num_asked = self._num_top[slots], self._num_asked[slots]
        num_top[void], num_asked[void] = NO_LOGPROBS, 0
        return HostRows(
            slots=slots.astype(np.int64),
            noise_keys=row_keys(self._mixed_seeds[slots], seq_lens),
            rows=rows,
            num_top=num_top,
            num_asked=num_asked,
        )


def row_uses(sampling: SamplingParams, vocab_size: int) -> int:
    """The bits of RowUse that rows of such a request carry."""
    conditions = [
        (RowUse.PENALTIES, sampling.has_penalties),
        (RowUse.LOGIT_BIAS, bool(sampling.logit_bias)),
        (RowUse.MIN_TOKENS, sampling.min_tokens > 0),
        (RowUse.LOGPROBS, sampling.logprobs is not None),
        (RowUse.ALLOWED, bool(sampling.allowed_token_ids)),
        (RowUse.BAD_WORDS, bool(sampling.bad_words)),
    ]
    if not sampling.is_greedy and 0 < sampling.top_k <= MAX_CANDIDATE_TOP_K:
        conditions.append((RowUse.CANDIDATES, True))
    elif not sampling.is_greedy:
        conditions += [
            (RowUse.DENSE, True),
            (RowUse.MIN_P, sampling.min_p > 0.0),
            (RowUse.TOP_K, MAX_CANDIDATE_TOP_K < sampling.top_k < vocab_size),
            (RowUse.TOP_P, sampling.top_p < 1.0),
        ]
    return sum(_BITS[use] for use, is_needed in conditions if is_needed)
