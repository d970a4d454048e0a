"""K and V of layers that keep unlike entries or none, or not equally long: a pool for each cache
group.

All groups of an account stand under one cache index: a page is a page of every one of them. Knows
no request and no free list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from attention.capability import AttentionBackendError
from attention.config import AttentionConfig, LayerAttentionConfig
from attention.memory.layout import CacheGroup
from attention.memory.token_to_kv_pool import TokenToKVPool

MakePool = Callable[[AttentionConfig, int], TokenToKVPool]


class GroupedTokenToKVPool(TokenToKVPool):
    """Maps a layer to its place in the pool of its group, and a layer that reads another one's K
    and V to that one's place.

    pages_by_account: of account 0, then of each of config.bounded_retentions, then the encoder's;
    account 0 may have no layer. make_pool: called once a group, with the config of a plain model of
    its layers.
    Raises AttentionBackendError for an fp8 cache, whose backends read one pool.
    """

    def __init__(
        self, config: AttentionConfig, pages_by_account: Sequence[int], make_pool: MakePool
    ) -> None:
        super().__init__(config, pages_by_account[0])
        if len(pages_by_account) != config.num_accounts:
            raise ValueError(f"{len(pages_by_account)} numbers of pages do not fit the accounts")
        if config.kv_dtype == torch.float8_e4m3fn:
            raise AttentionBackendError(
                "an FP8 KV cache is for models whose layers all keep K and V alike"
            )
        self._pages_by_account = tuple(pages_by_account)
        self._pools: list[TokenToKVPool] = []
        self._accounts: list[int] = []
        self._places: dict[int, tuple[TokenToKVPool, int]] = {}
        self._account_of_layer = tuple(map(config.account_of, range(config.num_layers)))
        for group in config.kv_layout.groups:
            account = config.account_of_group(group)
            pool = make_pool(_config_of_group(config, group), pages_by_account[account])
            self._pools.append(pool)
            self._accounts.append(account)
            for index, layer_id in enumerate(group.layer_ids):
                self._places[layer_id] = pool, index
        self._stored = frozenset(self._places)
        for layer_id, layer in enumerate(config.layers):
            if layer.kv_layer_id is not None:
                self._places[layer_id] = self._places[layer.kv_layer_id]

    @staticmethod
    def bytes_per_page(config: AttentionConfig) -> int:
        return config.kv_bytes_per_token * config.page_size

    @property
    def num_bytes(self) -> int:
        return sum(pool.num_bytes for pool in self._pools)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return tuple(tensor for pool in self._pools for tensor in pool.tensors())

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        pool, index = self._places[layer_id]
        return pool.get_kv_buffer(index)

    def set_kv_buffer(
        self, layer_id: int, out_cache_loc: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        """Raises ValueError for a layer that reads another one's K and V."""
        if layer_id not in self._stored:
            raise ValueError(f"layer {layer_id} stores no K and V of its own")
        pool, index = self._places[layer_id]
        pool.set_kv_buffer(index, out_cache_loc, k, v)

    def account_of(self, layer_id: int) -> int:
        return self._account_of_layer[layer_id]

    @property
    def pages_by_account(self) -> tuple[int, ...]:
        return self._pages_by_account

    def clear_tokens(self, cache_indices: torch.Tensor) -> None:
        self._clear(0, cache_indices)

    def clear_bounded(self, account: int, cache_indices: torch.Tensor) -> None:
        self._clear(account, cache_indices)

    def _clear(self, account: int, cache_indices: torch.Tensor) -> None:
        for pool in self._pools_of(account):
            pool.clear_tokens(cache_indices)

    def _pools_of(self, account: int) -> Iterator[TokenToKVPool]:
        for pool, own_account in zip(self._pools, self._accounts, strict=True):
            if own_account == account:
                yield pool


def _config_of_group(config: AttentionConfig, group: CacheGroup) -> AttentionConfig:
    """Of a model that consists of the group's layers."""
    heads = config.heads_of(group.layer_ids[0])
    return replace(
        config,
        num_layers=len(group.layer_ids),
        tp_q_head_num=heads.tp_q_head_num,
        tp_k_head_num=heads.tp_k_head_num,
        head_dim=heads.head_dim,
        v_head_dim=heads.v_head_dim,
        layers=(LayerAttentionConfig(),) * len(group.layer_ids),
        has_bounded_accounts=False,
    )
