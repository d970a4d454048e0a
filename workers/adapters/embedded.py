"""What adapters add to the embedding of a step's tokens on a GPU. Needs Triton."""

from dataclasses import dataclass

import torch

from workers.adapters.adapted_products import StepGroups
from workers.adapters.embedding_bank import EmbeddingBank
from workers.layers.cuda.adapter_products import AdapterMatrices, OutputBlocks


@dataclass(frozen=True, slots=True)
class AddedToEmbedding:
    """rows (num_slots + 1, vocab_size, max_rank): what tokens shrink to. matrices: what expands
    that."""

    rows: torch.Tensor
    matrices: AdapterMatrices
    step: StepGroups

    @classmethod
    def of(cls, bank: EmbeddingBank, step: StepGroups) -> "AddedToEmbedding":
        hidden_size, max_rank = bank.b.shape[1:]
        blocks = OutputBlocks.of([slice(0, hidden_size)], bank.b.device)
        # Nothing is shrunk by a product.
        no_inputs = bank.b.new_empty((bank.b.shape[0], max_rank, 0))
        matrices = AdapterMatrices(no_inputs, bank.b, bank.ranks.on_device, blocks)
        return cls(bank.a, matrices, step)

    def __call__(self, out: torch.Tensor, ids: torch.Tensor) -> None:
        """out (n, hidden_size), contiguous, += what adapters add to tokens of ids int64 (n,)."""
        shrunk = self.rows[self.step.slots.long(), ids].float().unsqueeze(0)
        self.matrices.expand(out, shrunk, self.step.groups)
