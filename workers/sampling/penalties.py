"""Repetition, presence and frequency penalties over per-slot token counts on the device.

Knows slots and token ids, not requests. Output tokens enter the counts on the device right after
sampling, so the host need not know them. The state costs 5 bytes per slot and vocabulary entry.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from workers.sampling.run_drafts import DraftsBefore, HeldSamples
from workers.sampling.transfer import upload


def apply_penalties(
    logits: Tensor,
    prompt_mask: Tensor,
    output_counts: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> Tensor:
    """Penalised copy of logits, float32 (n, vocab).

    prompt_mask: bool (n, vocab). output_counts: int32 (n, vocab). The penalties: (n, 1).
    Repetition (Keskar et al., CTRL, 2019) divides positive and multiplies negative logits of every
    token in prompt or output; then, as OpenAI defines them over the output only, frequency is
    taken off once per occurrence and presence once per token that occurs.
    """
    in_output = output_counts > 0
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    penalised = torch.where(prompt_mask | in_output, repeated, logits)
    return penalised.sub_(frequency * output_counts).sub_(presence * in_output)


class PenaltyState:
    """prompt_mask: bool, output_counts: int32, both (max_running_requests, vocab_size).

    Both have no rows until the first reset: most servers never see a penalty. That there is memory
    for them the start has tried (workers/runner/largest_step.py).
    """

    def __init__(self, max_running_requests: int, vocab_size: int, device: torch.device) -> None:
        self._shape = (max_running_requests, vocab_size)
        self._vocab_size = vocab_size
        self.prompt_mask = torch.zeros((0, vocab_size), dtype=torch.bool, device=device)
        self.output_counts = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)

    def reset(
        self,
        slots: npt.NDArray[np.int64],
        prompts: list[npt.NDArray[np.int32]],
        outputs: list[npt.NDArray[np.int32]],
    ) -> None:
        """Forget what the slots held and count the given prompt and output tokens instead."""
        if len(self.output_counts) == 0:
            self.prompt_mask = self.prompt_mask.new_zeros(self._shape)
            self.output_counts = self.output_counts.new_zeros(self._shape)
        slots_on_device, prompt_entries, output_entries = upload(
            [slots, self._flat_entries(slots, prompts), self._flat_entries(slots, outputs)],
            self.prompt_mask.device,
        )
        self.prompt_mask.index_fill_(0, slots_on_device, False)
        self.output_counts.index_fill_(0, slots_on_device, 0)
        self.prompt_mask.view(-1).index_fill_(0, prompt_entries, True)
        self._count(output_entries)

    def release(self) -> None:
        """Back to no rows: no slot has a penalty."""
        self.prompt_mask = self.prompt_mask.new_zeros((0, self._vocab_size))
        self.output_counts = self.output_counts.new_zeros((0, self._vocab_size))

    def add(self, slots: Tensor, token_ids: Tensor, held: HeldSamples | None = None) -> None:
        """Count one output token per row, both int64 (n,). held: of rows of runs, whose slots come
        several times: which of them count."""
        self._count(slots * self._vocab_size + token_ids, None if held is None else held.holds)

    def apply(
        self,
        logits: Tensor,
        slots: Tensor,
        penalties: Tensor,
        drafts: tuple[DraftsBefore, ...] = (),
    ) -> Tensor:
        """Penalised copy of logits (n, vocab) for slots (n,).

        penalties: float32 (n, 3), repetition, presence and frequency. drafts: of these rows, which
        count as output.
        """
        counts = self.output_counts.index_select(0, slots)
        for before in drafts:
            counts.scatter_add_(1, before.token_ids, before.counts)
        return apply_penalties(
            logits,
            self.prompt_mask.index_select(0, slots),
            counts,
            repetition=penalties[:, 0:1],
            presence=penalties[:, 1:2],
            frequency=penalties[:, 2:3],
        )

    def _count(self, entries: Tensor, counts: Tensor | None = None) -> None:
        """counts: bool (n,), which of them; all where left out."""
        if counts is None:
            counts = torch.ones_like(entries, dtype=torch.bool)
        self.output_counts.view(-1).scatter_add_(0, entries, counts.int())

    def _flat_entries(
        self, slots: npt.NDArray[np.int64], token_ids: list[npt.NDArray[np.int32]]
    ) -> npt.NDArray[np.int64]:
        lengths = [len(ids) for ids in token_ids]
        starts = np.repeat(slots * self._vocab_size, lengths)
        return starts + np.concatenate(token_ids, dtype=np.int64)
