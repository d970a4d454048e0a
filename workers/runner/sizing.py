"""What a rank decides before it allocates KV memory: device, backend, page size, pages.

Knows flags, devices and a loaded model's geometry; allocates nothing.
"""

import gc
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from attention.backends.base import AttentionBackend
from attention.config import AttentionConfig
from attention.cuda_timing import CudaEventAttentionTimer, new_cuda_event
from attention.memory.req_to_token_pool import ReqToTokenPool
from attention.memory.token_to_kv_pool import TokenToKVPool
from attention.router import build_attention
from attention.routes import AskedBackends, AttentionRoutes, choose_routes
from attention.selection import AttentionNeeds, detect_device
from attention.timing import AttentionTimer, CpuAttentionTimer
from attention.tuning.candidates import is_tuned
from attention.tuning.choice import TunedRoutes
from attention.tuning.layers import DecodeFront
from attention.tuning.router import build_tuned_attention
from attention.visibility import CAUSAL_ONLY, VisibilityKind
from workers.config import EngineConfig
from workers.engine.protocol import AttentionMeasurementRecord
from workers.errors import ConfigError
from workers.loading.loader import LoadedModel
from workers.models.base import AttentionGeometry
from workers.models.segmented import SegmentedCausalLM
from workers.parallel.group import SingleRank, TPGroup
from workers.runner.attention_report import measurement_records
from workers.runner.attention_tuning import TuningSubject, tuner_for
from workers.runner.deterministic import check_routes
from workers.runner.kv_memory import resolve_kv_dtype
from workers.runner.page_counts import pages_by_account
from workers.runner.state_sizing import bytes_per_slot, num_snapshots_of, state_bytes_of


class HasGeometry(Protocol):
    """A module that attends."""

    geometry: AttentionGeometry


class Attending(Protocol):
    """What attention is chosen for: a LoadedModel, or what has one layer beside it."""

    @property
    def model(self) -> HasGeometry: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...

    def attention_config(self, page_size: int, kv_dtype: torch.dtype) -> AttentionConfig:
        """As LoadedModel.attention_config."""


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Who attends, the geometry that the pools are made for, and this rank's page counts.

    pages_by_account: of account 0, then of each of config.bounded_retentions, then the encoder's;
    they count the reserved page. num_snapshots: of the states that a model keeps. The engine uses
    the smallest of its ranks.
    """

    routes: AttentionRoutes | TunedRoutes
    config: AttentionConfig
    pages_by_account: tuple[int, ...]
    num_snapshots: int

    def build(
        self, req_to_token_pool: ReqToTokenPool, token_to_kv_pool: TokenToKVPool
    ) -> AttentionBackend:
        """Over pools of config. AttentionBackendError as of create_attention_backend."""
        pools = req_to_token_pool, token_to_kv_pool
        if isinstance(self.routes, TunedRoutes):
            return build_tuned_attention(self.routes, self.config, *pools)
        return build_attention(self.routes, self.config, *pools)


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """Who attends, over which pages. has_bounded_accounts: as RouteChoice."""

    routes: AttentionRoutes | TunedRoutes
    page_size: int
    has_bounded_accounts: bool


_ALONE = SingleRank()
_ANY_PAGE_SIZE = 1


def resolve_device(config: EngineConfig) -> torch.device:
    """EngineConfig.device as a torch device; "auto" takes CUDA when there is any, "cuda" device 0.

    Raises ConfigError for what is no device or not there.
    """
    if config.device == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(config.device)
    except RuntimeError as error:
        raise ConfigError(f"device {config.device!r} is no torch device") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {config.device!r} was asked for but torch sees no CUDA device")
    if device == torch.device("cuda"):
        return torch.device("cuda", 0)
    return device


def plan_attention(
    config: EngineConfig,
    loaded: LoadedModel,
    num_padding_slots: int = 0,
    tp: TPGroup = _ALONE,
    bytes_beside: int = 0,
) -> AttentionPlan:
    """Choose backends, page size and number of pages for a loaded model.

    num_padding_slots: beyond those of requests, with states of their own. bytes_beside: of KV
    memory, which somebody else keeps of every token that the model keeps. All ranks of tp call it.
    Raises AttentionBackendError when no backend fits, ConfigError when the memory holds no page.
    """
    chosen = choose_attention(config, loaded, tp)
    kv_dtype = resolve_kv_dtype(config.kv_cache_dtype, loaded.dtype)
    attention_config = replace(
        loaded.attention_config(chosen.page_size, kv_dtype),
        has_bounded_accounts=chosen.has_bounded_accounts,
    )
    entries = loaded.model.state_entries
    state_bytes = state_bytes_of(config.max_running_requests + num_padding_slots, entries)
    kv_bytes = _kv_budget_bytes(config, attention_config.device)
    if bytes_beside:
        own = attention_config.kv_bytes_of_account(0)
        kv_bytes = kv_bytes * own // (own + bytes_beside)
    num_snapshots = num_snapshots_of(config, loaded.model, kv_bytes - state_bytes)
    state_bytes += num_snapshots * bytes_per_slot(entries)
    pages = pages_by_account(config, attention_config, kv_bytes - state_bytes, state_bytes)
    return AttentionPlan(chosen.routes, attention_config, pages, num_snapshots)


def attention_needs(config: EngineConfig, loaded: Attending) -> AttentionNeeds:
    """What all layers of the model have in common."""
    geometry = loaded.model.geometry
    layers = geometry.layers
    return AttentionNeeds(
        dtype=loaded.dtype,
        kv_dtype=resolve_kv_dtype(config.kv_cache_dtype, loaded.dtype),
        page_size=config.page_size,
        needs_unequal_head_dims=geometry.has_unequal_head_dims,
        needs_mla=geometry.latent is not None,
        needs_unlike_layers=any(layer.heads is not None for layer in layers),
        needs_shared_kv=any(layer.kv_layer_id is not None for layer in layers),
        needs_mixed_batches=config.enable_mixed_batches,
        head_dims=(geometry.head_dim, geometry.v_head_dim),
        needs_deterministic=config.deterministic,
        latent=geometry.latent,
        visibilities=CAUSAL_ONLY | ({VisibilityKind.TREE} if config.draft_tree else set()),
    )


def choose_attention(config: EngineConfig, loaded: Attending, tp: TPGroup) -> AttentionChoice:
    """By the order of preferences, or by measurement where that was asked for."""
    needs, layers = attention_needs(config, loaded), loaded.model.geometry.layers
    asked = AskedBackends(config.prefill_backend, config.decode_backend)
    device = detect_device(loaded.device)
    if not is_tuned(asked):
        choice = choose_routes(asked, device, needs, layers)
        if config.deterministic:
            check_routes(choice.routes, loaded.device)
        return AttentionChoice(choice.routes, choice.page_size, choice.has_bounded_accounts)
    subject = TuningSubject(
        asked,
        device,
        needs,
        loaded.attention_config(_ANY_PAGE_SIZE, needs.kv_dtype),
        _kv_budget_bytes(config, loaded.device) // 2,
        decode_front(loaded, needs),
    )
    tuned = tuner_for(config, tp, subject.front).choose(subject)
    if loaded.device.type == "cuda":
        # What measuring needed is the pool's; graphs and what they read are cycles of objects.
        gc.collect()
        torch.cuda.empty_cache()
    candidates = tuned.candidates
    return AttentionChoice(tuned, candidates.page_size, candidates.has_bounded_accounts)


def decode_front(loaded: Attending, needs: AttentionNeeds) -> DecodeFront | None:
    """None where the model hands over rotated queries, keys and values."""
    hands_over_projections = isinstance(loaded.model, SegmentedCausalLM)
    if loaded.device.type != "cuda" or needs.needs_mla or needs.kv_dtype != needs.dtype:
        return None
    if not hands_over_projections:
        return None
    # Triton comes with torch for CUDA only.
    from workers.runner.decode_front import FusedFront

    return FusedFront()


def attention_times(
    routes: AttentionRoutes | TunedRoutes,
) -> tuple[AttentionMeasurementRecord, ...]:
    """What candidates took, where they were measured."""
    return measurement_records(routes) if isinstance(routes, TunedRoutes) else ()


def make_timer(backend: AttentionBackend, device: torch.device) -> AttentionTimer:
    if device.type == "cuda":
        return CudaEventAttentionTimer(backend, new_cuda_event)
    return CpuAttentionTimer(backend)


def _kv_budget_bytes(config: EngineConfig, device: torch.device) -> int:
    """Bytes for KV memory: what the fraction leaves after the weights on CUDA, a flag on CPU."""
    if device.type != "cuda":
        return config.kv_cache_bytes
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return free_bytes - int(total_bytes * (1.0 - config.gpu_memory_fraction))
