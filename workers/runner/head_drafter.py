"""A head that drafts, on one rank: given a pool and states of its own, at its target's indices."""

from dataclasses import dataclass, replace

import torch

from attention.backends.base import AttentionBackend
from attention.config import AttentionConfig
from attention.memory.req_to_token_pool import ReqToTokenPool
from attention.memory.token_to_kv_pool import TokenToKVPool
from workers.config import EngineConfig
from workers.loading.draft_head import LoadedHead
from workers.parallel.group import TPGroup
from workers.runner.draft_model import untuned
from workers.runner.kv_memory import create_kv_pool, resolve_kv_dtype
from workers.runner.sizing import AttentionPlan, choose_attention
from workers.runner.tree_kernels import tree_kernels
from workers.speculation.device_drafter import DeviceDrafter, DeviceTreeDrafter
from workers.speculation.device_pair_tree import DevicePairTree
from workers.speculation.device_pairs import DevicePairs
from workers.speculation.history import TokenHistory
from workers.speculation.pair_tree import PairTreeProposer
from workers.speculation.pairs import FIRST_PAIR, PairHead, PairProposer
from workers.speculation.proposer import Proposer
from workers.speculation.taps import StepTaps

_PAGE_SIZE = 1
"""Pairs stand a position behind their tokens: no page of theirs begins where one of the target's
does."""


@dataclass(frozen=True, slots=True)
class PlacedHead:
    """As PlacedDrafter. states: (num cache indices, hidden_size), the target's, fused. tree: as in
    SpeculativeConfig."""

    head: PairHead
    backend: AttentionBackend
    pool: TokenToKVPool
    req_to_token_pool: ReqToTokenPool
    states: torch.Tensor
    tree: tuple[int, ...]

    def proposer(self, history: TokenHistory, taps: StepTaps) -> Proposer:
        own = history, self.head, self.backend, self.req_to_token_pool, self.states, taps
        return PairTreeProposer(*own, self.tree) if self.tree else PairProposer(*own)

    def device_drafter(self) -> DeviceDrafter:
        """As PlacedDrafter.device_drafter: chains."""
        table = self.req_to_token_pool.req_to_token
        return DevicePairs(self.head, self.backend, table, self.states)

    def tree_drafter(self) -> DeviceTreeDrafter:
        """As PlacedDrafter.tree_drafter."""
        table = self.req_to_token_pool.req_to_token
        kernels = tree_kernels(table.device)
        return DevicePairTree(self.head, self.backend, table, self.states, kernels)

    def prepare_while_idle(self) -> bool:
        """As PlacedDrafter.prepare_while_idle: there is nothing to measure."""
        return False

    def clear_tokens(self, cache_indices: torch.Tensor) -> None:
        self.pool.clear_tokens(cache_indices)
        self.states[cache_indices] = 0.0


class HeadDrafter:
    """As PagedDrafter."""

    def __init__(self, config: EngineConfig, loaded: LoadedHead, tp: TPGroup) -> None:
        self._config = replace(config, speculative=None, draft_quantization=None)
        self._loaded = loaded
        self._tp = tp

    @property
    def taps_final_states(self) -> bool:
        return self._loaded.taps_final_states

    @property
    def num_taps(self) -> int:
        return self._loaded.num_taps

    @property
    def _kv_dtype(self) -> torch.dtype:
        return resolve_kv_dtype(self._config.kv_cache_dtype, self._loaded.dtype)

    def num_bytes_a_token(self) -> int:
        """Of keys and values, and of the states beside them."""
        loaded = self._loaded
        own = loaded.attention_config(_PAGE_SIZE, self._kv_dtype)
        return own.kv_bytes_of_account(0) + loaded.hidden_size * loaded.dtype.itemsize

    def place(
        self, target: AttentionConfig, num_pages: int, req_to_token_pool: ReqToTokenPool
    ) -> PlacedHead:
        loaded = self._loaded
        config = replace(self._config, page_size=_PAGE_SIZE)
        if loaded.device.type == "cuda":
            config = untuned(config)
        chosen = choose_attention(config, loaded, self._tp)
        own = loaded.attention_config(chosen.page_size, self._kv_dtype)
        num_tokens = num_pages * target.page_size
        pool = create_kv_pool(own, (num_tokens,), ())
        own_positions = req_to_token_pool.without_first(FIRST_PAIR)
        backend = AttentionPlan(chosen.routes, own, (num_tokens,), 0).build(own_positions, pool)
        states = torch.zeros(
            num_tokens,
            loaded.hidden_size,
            dtype=loaded.dtype,
            device=loaded.device,
        )
        tree = config.draft_tree
        return PlacedHead(loaded.model, backend, pool, req_to_token_pool, states, tree)
