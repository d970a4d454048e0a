"""What a head is trained and judged on: texts of the target's own, and what it made of them.

Knows a target of transformers and prompts as token ids. Knows no head.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from workers.builtin import fit

IGNORED = -100


@dataclass(frozen=True, slots=True)
class OwnText:
    """token_ids: a prompt of num_prompt tokens, and what the target says greedily behind it."""

    token_ids: list[int]
    num_prompt: int


@dataclass(frozen=True, slots=True)
class ReadBatch:
    """Texts as the target reads them.

    token_ids: int64 (B, T + 1), filled up with zeros. taps: float16 (B, T, 3 * hidden_size), states
    of all tokens but the last. logits: float16 (B, T + 1, draft_vocab_size), the target's of the
    draft vocabulary. likeliest: int64 (B, T + 1), the target's next token in that vocabulary's ids,
    IGNORED where that has none, and behind a text's last token but one. is_said: bool (B, T + 1),
    whether the next token is the target's own.
    """

    token_ids: Tensor
    taps: Tensor
    logits: Tensor
    likeliest: Tensor
    is_said: Tensor


def own_texts(
    target: nn.Module,
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    end_ids: Sequence[int],
    batch_size: int,
) -> Iterator[OwnText]:
    """num_tokens: of an answer at most. end_ids: tokens that end one."""
    order = sorted(prompts, key=len)
    device = next(target.parameters()).device
    for first in range(0, len(order), batch_size):
        rows = order[first : first + batch_size]
        width = max(map(len, rows))
        padded = torch.tensor([[0] * (width - len(row)) + list(row) for row in rows], device=device)
        lens = torch.tensor([len(row) for row in rows], device=device)
        mask = (torch.arange(width, device=device) >= width - lens[:, None]).long()
        with torch.no_grad(), fit.autocast(device):
            generate = target.generate
            said = generate(  # type: ignore[operator]
                padded,
                attention_mask=mask,
                max_new_tokens=num_tokens,
                do_sample=False,
                eos_token_id=list(end_ids),
                pad_token_id=end_ids[0],
            )
        for row, ids in zip(rows, said[:, width:].tolist(), strict=True):
            ends = [place for place, token in enumerate(ids) if token in end_ids]
            yield OwnText([*row, *ids[: ends[0] + 1 if ends else None]], len(row))


def frequent_tokens(texts: Sequence[OwnText], vocab_size: int, num: int) -> list[int]:
    """What the target says most, ascending."""
    said = np.concatenate([np.array(text.token_ids[text.num_prompt :]) for text in texts])
    counts = np.bincount(said, minlength=vocab_size)
    return sorted(np.argsort(-counts, kind="stable")[:num].tolist())


class TextReader:
    """Runs the target over texts."""

    def __init__(self, target: nn.Module, taps: Sequence[int], draft_ids: Sequence[int]) -> None:
        self._target = target
        self._taps = taps
        self._device = next(target.parameters()).device
        self._draft_ids = torch.tensor(draft_ids, device=self._device)

    @torch.no_grad()
    def read(self, texts: Sequence[OwnText]) -> ReadBatch:
        width = max(len(text.token_ids) for text in texts)
        padded = [text.token_ids + [0] * (width - len(text.token_ids)) for text in texts]
        token_ids = torch.tensor(padded, device=self._device)
        lens = torch.tensor([len(text.token_ids) for text in texts], device=self._device)[:, None]
        begins = torch.tensor([text.num_prompt for text in texts], device=self._device)[:, None]
        places = torch.arange(width, device=self._device)
        with fit.autocast(self._device):
            output = self._target(token_ids, output_hidden_states=True, use_cache=False)
        states = [output.hidden_states[layer + 1][:, :-1] for layer in self._taps]
        has_next = places < lens - 1
        return ReadBatch(
            token_ids,
            torch.cat(states, -1).half(),
            output.logits[..., self._draft_ids].half(),
            self._own_ids(output.logits.argmax(-1)).masked_fill(~has_next, IGNORED),
            has_next & (places >= begins - 1),
        )

    def _own_ids(self, token_ids: Tensor) -> Tensor:
        places = torch.searchsorted(self._draft_ids, token_ids).clamp(max=len(self._draft_ids) - 1)
        return torch.where(self._draft_ids[places] == token_ids, places, IGNORED)
