"""A model's body, called for equally long rows with its own attention. Knows no head."""

from inspect import signature
from typing import Any

import torch
from torch import nn

from workers.errors import ModelLoadError
from workers.models.transformers_cache_name import cache_name
from workers.models.transformers_row_cache import KeptKV, RowCache


class RowBody:
    """model: the causal language model whose body this is; what generate() would give it, by the
    names that it takes, is given to the body."""

    def __init__(self, model: nn.Module, body: nn.Module) -> None:
        self._body = body
        names = signature(model.forward).parameters
        self._takes_mask = "attention_mask" in names
        self.takes_positions = "position_ids" in names
        self._cache_name = cache_name(model.forward)

    @property
    def takes_cache(self) -> bool:
        return self._cache_name is not None

    def run(self, input_ids: torch.Tensor, num_cached: int, kept: KeptKV) -> torch.Tensor:
        """input_ids int64 (rows, n), on top of num_cached tokens of each row -> final states
        (rows, n, hidden). The model counts its positions from its cache."""
        if self._cache_name is None:
            raise ModelLoadError(f"{type(self._body).__name__} takes no cache")
        cache = RowCache(kept, num_cached)
        num_rows, num_new = input_ids.shape
        return self._run(
            input_ids,
            self._mask(input_ids, num_cached + num_new),
            use_cache=True,
            **{self._cache_name: cache},
        )

    def run_whole(self, input_ids: torch.Tensor, counts_positions: bool = True) -> torch.Tensor:
        """Rows without a prefix and without a cache; positions from 0 where the model does not
        count them."""
        given: dict[str, Any] = {}
        if not counts_positions:
            num_rows, num_tokens = input_ids.shape
            of_row = torch.arange(num_tokens, device=input_ids.device)
            given["position_ids"] = of_row.repeat(num_rows, 1)
        mask = self._mask(input_ids, input_ids.shape[1])
        return self._run(input_ids, mask, use_cache=False, **given)

    def _mask(self, input_ids: torch.Tensor, num_tokens: int) -> dict[str, Any]:
        """No padding."""
        if not self._takes_mask:
            return {}
        return {"attention_mask": input_ids.new_ones(input_ids.shape[0], num_tokens)}

    def _run(self, input_ids: torch.Tensor, mask: dict[str, Any], **given: Any) -> torch.Tensor:
        hidden: torch.Tensor = self._body(
            input_ids=input_ids, return_dict=True, **mask, **given
        ).last_hidden_state
        return hidden
