"""What a head is trained and judged on: texts of the target's own, and what it makes of them.

Knows a target of transformers and texts as token ids. Knows no head and no engine.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

IGNORED = -100
_WIDTH_STEP = 16


@dataclass(frozen=True, slots=True)
class OwnText:
    """token_ids: a prompt of num_prompt tokens, and what the target says greedily behind it:
    nothing, where a text is only read."""

    token_ids: list[int]
    num_prompt: int

    @property
    def num_said(self) -> int:
        return len(self.token_ids) - self.num_prompt


@dataclass(frozen=True, slots=True)
class TextSet:
    """What is trained on and what a head is judged by."""

    train: list[OwnText]
    held_out: list[OwnText]

    def save(self, file: Path) -> None:
        """As a compressed .npz, in place of what is there; whoever reads sees one or the other."""
        texts = [*self.held_out, *self.train]
        ids = np.fromiter((one for text in texts for one in text.token_ids), np.uint32)
        narrow = np.uint16 if not len(ids) or ids.max() < 1 << 16 else np.uint32
        part = file.with_suffix(".part")
        with part.open("wb") as stream:
            np.savez_compressed(
                stream,
                token_ids=ids.astype(narrow),
                lens=np.array([len(text.token_ids) for text in texts], np.int32),
                num_prompt=np.array([text.num_prompt for text in texts], np.int32),
                num_held_out=np.array(len(self.held_out)),
            )
        part.replace(file)

    @staticmethod
    def load(file: Path) -> "TextSet":
        """What save wrote."""
        with np.load(file) as stored:
            rows = np.split(stored["token_ids"], np.cumsum(stored["lens"])[:-1])
            pairs = zip(rows, stored["num_prompt"].tolist(), strict=True)
            texts = [OwnText(row.tolist(), num_prompt) for row, num_prompt in pairs]
            num_held_out = int(stored["num_held_out"])
        return TextSet(texts[num_held_out:], texts[:num_held_out])


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Texts side by side. token_ids: int64 (B, T + 1), filled up with zeros. lens, num_prompt:
    int64 (B, 1)."""

    token_ids: Tensor
    lens: Tensor
    num_prompt: Tensor


class TextBatches:
    """Texts on a device, in batches of like lengths."""

    def __init__(
        self, texts: Sequence[OwnText], batch_tokens: int, device: torch.device | str
    ) -> None:
        """batch_tokens: of a batch at most, filling included, unless one text is longer."""
        self._batch_tokens = batch_tokens
        self._lens = np.array([len(text.token_ids) for text in texts])
        padded = np.zeros((len(texts), _width(self._lens.max()) + 1), np.int32)
        for row, text in enumerate(texts):
            padded[row, : len(text.token_ids)] = text.token_ids
        self._token_ids = torch.from_numpy(padded).to(device)
        facts = [(len(text.token_ids), text.num_prompt) for text in texts]
        self._facts = torch.tensor(facts, device=device)

    def __len__(self) -> int:
        """Batches of one pass over the texts."""
        return len(self._rows(None))

    def in_order(self) -> Iterator[TokenBatch]:
        """Every text once."""
        return map(self._batch, self._rows(None))

    def shuffled(self, seed: int) -> Iterator[TokenBatch]:
        """Without end; in every pass a text has other company."""
        rng = np.random.default_rng(seed)
        while True:
            rows = self._rows(rng)
            yield from (self._batch(rows[place]) for place in rng.permutation(len(rows)))

    def _rows(self, rng: np.random.Generator | None) -> list[npt.NDArray[np.intp]]:
        """Of each batch, longest first; with rng texts of one width are shuffled."""
        widths = _width(self._lens)
        order = np.argsort(-widths, kind="stable")
        if rng is not None:
            order = np.lexsort((rng.random(len(widths)), -widths))
        rows, first = list[npt.NDArray[np.intp]](), 0
        while first < len(order):
            num = max(1, self._batch_tokens // int(widths[order[first]]))
            rows.append(order[first : first + num])
            first += num
        return rows

    def _batch(self, rows: npt.NDArray[np.intp]) -> TokenBatch:
        width = int(_width(self._lens[rows].max())) + 1
        index = torch.from_numpy(rows).to(self._facts.device)
        facts = self._facts[index]
        return TokenBatch(self._token_ids[index, :width].long(), facts[:, :1], facts[:, 1:])


def _width(lens: Any) -> Any:
    """Anchors of a batch of texts of these lengths, a multiple of _WIDTH_STEP."""
    return (lens + _WIDTH_STEP - 2) // _WIDTH_STEP * _WIDTH_STEP


@dataclass(frozen=True, slots=True)
class ReadBatch:
    """Texts as the target reads them.

    token_ids: int64 (B, T + 1), filled up with zeros. taps: (B, T, 3 * hidden_size), states of all
    tokens but the last. logits: (B, T + 1, draft_vocab_size), the target's of the draft vocabulary.
    likeliest: int64 (B, T + 1), the target's next token in that vocabulary's ids, IGNORED where
    that has none, and behind a text's last token but one. is_said: bool (B, T + 1), whether the
    next token is the target's own.
    """

    token_ids: Tensor
    taps: Tensor
    logits: Tensor
    likeliest: Tensor
    is_said: Tensor


def frequent_tokens(texts: Sequence[OwnText], vocab_size: int, num: int) -> list[int]:
    """What the target says most, ascending."""
    said = np.concatenate([np.array(text.token_ids[text.num_prompt :], int) for text in texts])
    counts = np.bincount(said, minlength=vocab_size)
    return sorted(np.argsort(-counts, kind="stable")[:num].tolist())


class TextReader:
    """Runs the target over texts, in its own dtype unless the caller casts."""

    def __init__(self, target: nn.Module, taps: Sequence[int], draft_ids: Sequence[int]) -> None:
        self._target = target
        self._taps = taps
        device = next(target.parameters()).device
        self._draft_ids = torch.tensor(draft_ids, device=device)

    @torch.no_grad()
    def read(self, batch: TokenBatch) -> ReadBatch:
        output = self._target(batch.token_ids, output_hidden_states=True, use_cache=False)
        states = [output.hidden_states[layer + 1][:, :-1] for layer in self._taps]
        places = torch.arange(batch.token_ids.shape[1], device=batch.token_ids.device)
        has_next = places < batch.lens - 1
        return ReadBatch(
            batch.token_ids,
            torch.cat(states, -1),
            output.logits[..., self._draft_ids],
            self._own_ids(output.logits.argmax(-1)).masked_fill(~has_next, IGNORED),
            has_next & (places >= batch.num_prompt - 1),
        )

    def _own_ids(self, token_ids: Tensor) -> Tensor:
        places = torch.searchsorted(self._draft_ids, token_ids).clamp(max=len(self._draft_ids) - 1)
        return torch.where(self._draft_ids[places] == token_ids, places, IGNORED)
