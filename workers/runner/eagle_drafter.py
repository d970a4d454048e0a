"""The EAGLE-3 head of a rank: loaded for its target, and given a pool and states of its own."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from attention.backends.base import AttentionBackend
from attention.config import AttentionConfig
from attention.memory.req_to_token_pool import ReqToTokenPool
from attention.memory.token_to_kv_pool import TokenToKVPool
from workers.config import EngineConfig
from workers.layers.sharding import ShardContext
from workers.loading.eagle_head import LoadedHead, load_head
from workers.loading.loader import LoadedModel
from workers.models.eagle_head import EagleHead
from workers.parallel.group import TPGroup
from workers.runner.draft_model import check_geometry
from workers.runner.kv_memory import create_kv_pool, resolve_kv_dtype
from workers.runner.sizing import AttentionPlan, choose_attention
from workers.speculation.eagle import FIRST_PAIR, EagleProposer
from workers.speculation.history import TokenHistory
from workers.speculation.proposer import Proposer
from workers.speculation.taps import StepTaps

_ANY_PAGE_SIZE = 1


@dataclass(frozen=True, slots=True)
class PlacedHead:
    """As PlacedDrafter. states: (num cache indices, hidden_size), the target's, fused."""

    head: EagleHead
    backend: AttentionBackend
    pool: TokenToKVPool
    req_to_token_pool: ReqToTokenPool
    states: torch.Tensor

    def proposer(self, history: TokenHistory, taps: StepTaps) -> Proposer:
        return EagleProposer(
            history, self.head, self.backend, self.req_to_token_pool, self.states, taps
        )

    def clear_tokens(self, cache_indices: torch.Tensor) -> None:
        self.pool.clear_tokens(cache_indices)
        self.states[cache_indices] = 0.0


class EagleDrafter:
    """As PagedDrafter. folder: of the head. Raises ConfigError where the two do not fit together,
    beside what load_head raises."""

    def __init__(self, config: EngineConfig, folder: str, target: LoadedModel, tp: TPGroup) -> None:
        check_geometry(target, "have an EAGLE-3 head")
        self._config = replace(config, speculative=None)
        self._tp = tp
        shard = ShardContext(tp, target.dtype, target.device)
        seed = config.dummy_weights_seed if config.load_format == "dummy" else None
        self._loaded: LoadedHead = load_head(Path(folder).expanduser(), target, shard, seed)

    @property
    def _kv_dtype(self) -> torch.dtype:
        return resolve_kv_dtype(self._config.kv_cache_dtype, self._loaded.dtype)

    def num_bytes_a_token(self) -> int:
        """Of keys and values, and of the states beside them."""
        own = self._loaded.attention_config(_ANY_PAGE_SIZE, self._kv_dtype)
        return own.kv_bytes_of_account(0) + self._hidden_size * self._loaded.dtype.itemsize

    @property
    def _hidden_size(self) -> int:
        size: int = self._loaded.model.fc.weight.shape[0]
        return size

    def place(
        self, target: AttentionConfig, num_pages: int, req_to_token_pool: ReqToTokenPool
    ) -> PlacedHead:
        loaded = self._loaded
        config = replace(self._config, page_size=target.page_size)
        chosen = choose_attention(config, loaded, self._tp)
        own = loaded.attention_config(chosen.page_size, self._kv_dtype)
        pool = create_kv_pool(own, (num_pages,), ())
        own_positions = req_to_token_pool.without_first(FIRST_PAIR)
        backend = AttentionPlan(chosen.routes, own, (num_pages,), 0).build(own_positions, pool)
        states = torch.zeros(
            num_pages * chosen.page_size,
            self._hidden_size,
            dtype=loaded.dtype,
            device=loaded.device,
        )
        return PlacedHead(loaded.model, backend, pool, req_to_token_pool, states)
