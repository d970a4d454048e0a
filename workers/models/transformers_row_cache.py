"""A cache of transformers' kind whose keys and values are kept by somebody else.

A model that computes attention itself asks its cache for the keys and values of all tokens so far,
and how many there are. Knows no pool, no page and no request.
"""

from typing import Any, NamedTuple, NoReturn, Protocol

import torch
from transformers.cache_utils import Cache

from workers.errors import ModelLoadError


class CachePlace(NamedTuple):
    """What a model keeps its tensors under: of attention in a layer, or of its indexer."""

    kind: str
    layer_idx: int


class KeptKV(Protocol):
    """Keys and values of some equally long rows, the tokens of this pass among them."""

    def exchange(
        self, place: CachePlace, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep k (rows, heads, n, head_dim) and v (rows, heads, n, v_head_dim) of the n new tokens;
        give those of all tokens so far, in the same layout and dtypes."""


class RowCache(Cache):
    """For one pass of a model over rows that all have num_cached tokens before their new ones.

    A state beside keys and values is refused with ModelLoadError.
    """

    def __init__(self, kept: KeptKV, num_cached: int) -> None:
        super().__init__(layers=[])
        self._kept = kept
        self._num_cached = num_cached
        self._num_new: dict[int, int] = {}

    def __bool__(self) -> bool:
        """Not by the number of its layers, of which there are none."""
        return True

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *_: Any,
        **__: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._num_new[layer_idx] = key_states.shape[-2]
        place = CachePlace("heads", layer_idx)
        if value_states.shape[-1] == 0:  # a latent whose rotated part is empty
            keys = self._exchange_one(place, key_states)
            return keys, keys[..., :0]
        return self._kept.exchange(place, key_states, value_states)

    def update_indexer(
        self, indexer_key_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> torch.Tensor:
        """(rows, n, dim) -> (rows, all tokens, dim), kept as one head."""
        keys = indexer_key_states.unsqueeze(1)
        return self._exchange_one(CachePlace("indexer", layer_idx), keys).squeeze(1)

    def _exchange_one(self, place: CachePlace, keys: torch.Tensor) -> torch.Tensor:
        """Keys without values are kept in two halves."""
        first, second = keys.tensor_split(2, dim=-1)
        return torch.cat(self._kept.exchange(place, first, second), dim=-1)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """As transformers' own cache counts: with the new tokens once the layer has given them."""
        return self._num_cached + self._num_new.get(layer_idx, 0)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """How many keys a mask is for, and from which one on: no window cuts them here."""
        return self.get_seq_length(layer_idx) + query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """None: rows grow."""
        return -1

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise ModelLoadError("keeps more than keys and values in its cache")

    get_conv_state = _refuse
    update_conv_state = _refuse
    get_recurrent_state = _refuse
    update_recurrent_state = _refuse
    has_previous_state = _refuse
