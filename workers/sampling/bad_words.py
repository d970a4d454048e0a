"""bad_words: sequences of tokens whose last one a slot may not sample behind the others.

Knows slots and token ids, not requests nor text. What was sampled enters on the device right after
sampling, so the host need not know it. The state is padded to the most and the longest words that
any slot has had: (max_running_requests, words, tokens).
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from workers.sampling.run_drafts import DraftsBefore, HeldSamples
from workers.sampling.transfer import upload

Words = tuple[tuple[int, ...], ...]

_ANY, _NEVER, _NO_TOKEN = -1, -2, -3


class BadWords:
    """prefixes: int32 (slots, words, tokens), what comes before each word's last token, at the end;
    _ANY before it. last: int64 (slots, words). recent: int32 (slots, tokens), output so far, its
    end. A place without a word has a prefix that nothing matches.
    """

    def __init__(self, max_running_requests: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        shape = (max_running_requests, 0, 1)
        self.prefixes = torch.zeros(shape, dtype=torch.int32, device=device)
        self.last = torch.zeros(shape[:2], dtype=torch.int64, device=device)
        self.recent = torch.zeros((max_running_requests, 1), dtype=torch.int32, device=device)

    def set(
        self, slots: Sequence[int], words: Sequence[Words], outputs: Sequence[npt.NDArray[np.int32]]
    ) -> None:
        """Replace what each slot may not say. outputs: of the requests so far."""
        self._grow(max(map(len, words)), max(len(word) - 1 for some in words for word in some))
        num_words, num_tokens = self.prefixes.shape[1:]
        prefixes = np.full((len(slots), num_words, num_tokens), _NEVER, dtype=np.int32)
        last = np.zeros((len(slots), num_words), dtype=np.int64)
        recent = np.full((len(slots), num_tokens), _NO_TOKEN, dtype=np.int32)
        for row, (some, output) in enumerate(zip(words, outputs, strict=True)):
            for column, word in enumerate(some):
                prefixes[row, column] = _ANY
                prefixes[row, column, num_tokens + 1 - len(word) :] = word[:-1]
                last[row, column] = word[-1]
            known = output[-num_tokens:]
            recent[row, num_tokens - len(known) :] = known
        indices, *values = upload(
            [np.array(slots, dtype=np.int64), prefixes, last, recent], self.last.device
        )
        for table, rows in zip((self.prefixes, self.last, self.recent), values, strict=True):
            table.index_copy_(0, indices, rows)

    def rule_out_(
        self, logits: Tensor, rows: Tensor, slots: Tensor, drafts: tuple[DraftsBefore, ...] = ()
    ) -> None:
        """-inf, in place, for what would end a word of slots[i] in logits[rows[i]].

        logits: contiguous float32 (n, vocab). rows, slots: int64 (m,). drafts: of these rows, which
        count as output.
        """
        prefixes = self.prefixes.index_select(0, slots)
        recent = self._recent(slots, drafts).unsqueeze(1)
        is_met = ((prefixes == recent) | (prefixes == _ANY)).all(dim=-1)
        entries = self.last.index_select(0, slots) + rows.unsqueeze(1) * self._vocab_size
        values = torch.zeros_like(is_met, dtype=torch.float32).masked_fill(is_met, -torch.inf)
        logits.view(-1).scatter_add_(0, entries.view(-1), values.view(-1))

    def add(self, slots: Tensor, token_ids: Tensor, held: HeldSamples | None = None) -> None:
        """One output token per row, both int64 (n,). held: of rows of runs, whose slots come
        several times: up to which of them is output."""
        recent = self._recent(slots, () if held is None else (held.drafts,))
        newest = token_ids.to(torch.int32).unsqueeze(1)
        extended = torch.cat([recent[:, 1:], newest], dim=1)
        if held is not None:
            slots, extended = slots.index_select(0, held.last), extended.index_select(0, held.last)
        self.recent.index_copy_(0, slots, extended)

    def _recent(self, slots: Tensor, drafts: tuple[DraftsBefore, ...]) -> Tensor:
        """The end of each row's output, its drafts included: int32 (m, tokens)."""
        recent = self.recent.index_select(0, slots)
        for before in drafts:
            columns = before.num + torch.arange(recent.shape[1], device=recent.device)
            recent = torch.cat([recent, before.token_ids.to(torch.int32)], dim=1).gather(1, columns)
        return recent

    def _grow(self, num_words: int, num_tokens: int) -> None:
        more_words = max(0, _rounded(num_words) - self.prefixes.shape[1])
        more_tokens = max(0, _rounded(num_tokens) - self.prefixes.shape[2])
        if not (more_words or more_tokens):
            return
        pad = torch.nn.functional.pad
        self.prefixes = pad(self.prefixes, (more_tokens, 0), value=_ANY)
        self.prefixes = pad(self.prefixes, (0, 0, 0, more_words), value=_NEVER)
        self.last = pad(self.last, (0, more_words))
        self.recent = pad(self.recent, (more_tokens, 0), value=_NO_TOKEN)


def _rounded(size: int) -> int:
    """The next power of two, 1 at least."""
    return 1 << max(0, size - 1).bit_length()
