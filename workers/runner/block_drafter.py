"""A block drafter, on one rank: given a pool of its own, at its target's pages."""

from dataclasses import dataclass, replace

import torch

from attention.backends.base import AttentionBackend
from attention.config import AttentionConfig
from attention.memory.req_to_token_pool import ReqToTokenPool
from attention.memory.token_to_kv_pool import TokenToKVPool
from attention.routes import AskedBackends, choose_routes
from attention.selection import detect_device
from attention.visibility import CAUSAL_ONLY, VisibilityKind
from workers.config import EngineConfig
from workers.errors import ConfigError
from workers.loading.dflash import LoadedBlockDrafter
from workers.runner.draft_model import untuned
from workers.runner.kv_memory import create_kv_pool, resolve_kv_dtype
from workers.runner.sizing import AttentionPlan, attention_needs
from workers.speculation.blocks import BlockDrafter, BlockProposer
from workers.speculation.device_drafter import DeviceDrafter, DeviceTreeDrafter
from workers.speculation.history import TokenHistory
from workers.speculation.proposer import Proposer
from workers.speculation.taps import StepTaps

_ANY_PAGE_SIZE = 1


@dataclass(frozen=True, slots=True)
class PlacedBlockDrafter:
    """As PlacedDrafter. table: int32 (num_slots, max_context_len), req_to_token."""

    drafter: BlockDrafter
    backend: AttentionBackend
    pool: TokenToKVPool
    table: torch.Tensor

    def proposer(self, history: TokenHistory, taps: StepTaps) -> Proposer:
        return BlockProposer(history, self.drafter, self.backend, self.table, taps)

    def device_drafter(self) -> DeviceDrafter:
        """Raises ConfigError: none is written."""
        raise ConfigError("drafters of blocks run on CPU only so far")

    def tree_drafter(self) -> DeviceTreeDrafter:
        """Raises ConfigError: a block has no branches."""
        raise ConfigError("drafters of blocks make no trees")

    def prepare_while_idle(self) -> bool:
        """As PlacedDrafter.prepare_while_idle: there is nothing to measure."""
        return False

    def clear_tokens(self, cache_indices: torch.Tensor) -> None:
        self.pool.clear_tokens(cache_indices)


class PagedBlockDrafter:
    """As PagedDrafter."""

    def __init__(self, config: EngineConfig, loaded: LoadedBlockDrafter) -> None:
        """config: the target's."""
        self._config = untuned(replace(config, speculative=None))
        self._loaded = loaded

    @property
    def taps_final_states(self) -> bool:
        return False

    @property
    def num_taps(self) -> int:
        return self._loaded.num_taps

    @property
    def _kv_dtype(self) -> torch.dtype:
        return resolve_kv_dtype(self._config.kv_cache_dtype, self._loaded.dtype)

    def num_bytes_a_token(self) -> int:
        """Of keys and values."""
        own = self._loaded.attention_config(_ANY_PAGE_SIZE, self._kv_dtype)
        return own.kv_bytes_of_account(0)

    def place(
        self, target: AttentionConfig, num_pages: int, req_to_token_pool: ReqToTokenPool
    ) -> PlacedBlockDrafter:
        """Raises AttentionBackendError where none that was asked for lets a block see itself."""
        loaded, config = self._loaded, replace(self._config, page_size=target.page_size)
        needs = replace(
            attention_needs(config, loaded),
            visibilities=CAUSAL_ONLY | {VisibilityKind.EVERYTHING},
        )
        asked = AskedBackends(config.prefill_backend, config.decode_backend)
        layers = loaded.model.geometry.layers
        chosen = choose_routes(asked, detect_device(loaded.device), needs, layers)
        own = loaded.attention_config(chosen.page_size, self._kv_dtype)
        pool = create_kv_pool(own, (num_pages,), ())
        backend = AttentionPlan(chosen.routes, own, (num_pages,), 0).build(req_to_token_pool, pool)
        return PlacedBlockDrafter(loaded.model, backend, pool, req_to_token_pool.req_to_token)
