"""Texts of a step to vectors: padded batches through the model, then what is pooled of them.

Knows no queue and no request beyond its text.
"""

from collections.abc import Sequence

import numpy as np
import torch

from workers.encoder_only.batches import batches_of
from workers.encoder_only.text import Text
from workers.loading.weights_cache import WeightsLease
from workers.models.encoder_only import EncoderOnlyModel
from workers.pooling.params import Pooling
from workers.pooling.vectors import FloatArray


class TextRunner:
    """On one device, each call to its end before it returns. lease: on the files that parameters in
    host memory may be, held as long as they are."""

    def __init__(self, model: EncoderOnlyModel, pooling: Pooling, lease: WeightsLease) -> None:
        self.attention = model.attention
        self._model = model
        self._pooling = pooling
        self._lease = lease

    def run(self, texts: Sequence[Text]) -> list[FloatArray | None]:
        """Of each text float32 (size,), as the model gives it: not cut, not normalised, without
        activation. None: the device has no memory for it."""
        results: list[FloatArray | None] = [None] * len(texts)
        for indices in batches_of([len(text.token_ids) for text in texts]):
            vectors = self._run_within_memory([texts[index] for index in indices])
            for index, vector in zip(indices, vectors, strict=True):
                results[index] = vector
        return results

    def _run_within_memory(self, texts: list[Text]) -> list[FloatArray | None]:
        """In halves where the texts do not fit together."""
        try:
            return list(self._run_batch(texts))
        except torch.OutOfMemoryError:
            if len(texts) == 1:
                return [None]
        # Not before the error is gone: its frames hold the batch's tensors.
        half = len(texts) // 2
        return self._run_within_memory(texts[:half]) + self._run_within_memory(texts[half:])

    @torch.inference_mode()
    def _run_batch(self, texts: list[Text]) -> FloatArray:
        """float32 (len(texts), size)."""
        lens = np.array([len(text.token_ids) for text in texts])
        shape = len(texts), int(lens.max())
        packed = np.zeros((3, *shape), dtype=np.int64)
        packed[0] = self._model.pad_token_id
        for row, text in enumerate(texts):
            length = lens[row]
            packed[0, row, :length] = text.token_ids
            packed[1, row, :length] = 1
            if text.second_start:
                packed[2, row, text.second_start : length] = 1
        ids, mask, token_types = torch.from_numpy(packed).to(self._model.device)
        output = self._model(ids, mask, token_types)
        vectors: FloatArray = pooled(output, mask, self._pooling).cpu().numpy()
        return vectors


def pooled(output: torch.Tensor, mask: torch.Tensor, pooling: Pooling) -> torch.Tensor:
    """output: final states (n, length, hidden_size), or for SCORES logits (n, num_labels). mask:
    int64 (n, length). Returns float32 (n, size), of no padding, whatever stands there."""
    if pooling is Pooling.SCORES:
        return output.float()
    if pooling is Pooling.CLS:
        return output[:, 0].float()
    lens = mask.sum(dim=1)
    if pooling is Pooling.LAST:
        return output[torch.arange(len(output), device=output.device), lens - 1].float()
    is_token = mask.bool().unsqueeze(-1)
    if pooling is Pooling.MAX:
        return output.float().masked_fill(~is_token, -torch.inf).amax(dim=1)
    total = output.float().masked_fill(~is_token, 0.0).sum(dim=1)
    return total / lens.unsqueeze(-1)
