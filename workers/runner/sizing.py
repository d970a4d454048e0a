"""What a rank decides before it allocates KV memory: device, backend, page size, pages.

Knows flags, devices and a loaded model's geometry; allocates nothing.
"""

from dataclasses import dataclass, replace

import torch

from attention.backends.base import AttentionBackend
from attention.config import AttentionConfig
from attention.cuda_timing import CudaEventAttentionTimer, new_cuda_event
from attention.routes import AskedBackends, AttentionRoutes, choose_routes
from attention.selection import AttentionNeeds, detect_device
from attention.timing import AttentionTimer, CpuAttentionTimer
from workers.config import EngineConfig
from workers.errors import ConfigError
from workers.loading.loader import LoadedModel
from workers.runner.kv_memory import resolve_kv_dtype
from workers.runner.page_counts import pages_by_account
from workers.runner.state_sizing import bytes_per_slot, num_snapshots_of, state_bytes_of


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Who attends, the geometry that the pools are made for, and this rank's page counts.

    pages_by_account: of account 0, then of each of config.bounded_retentions, then the encoder's;
    they count the reserved page. num_snapshots: of the states that a model keeps. The engine uses
    the smallest of its ranks.
    """

    routes: AttentionRoutes
    config: AttentionConfig
    pages_by_account: tuple[int, ...]
    num_snapshots: int


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
    config: EngineConfig, loaded: LoadedModel, num_padding_slots: int = 0
) -> AttentionPlan:
    """Choose backends, page size and number of pages for a loaded model.

    num_padding_slots: beyond those of requests, with states of their own.
    Raises AttentionBackendError when no backend fits, ConfigError when the memory holds no page.
    """
    geometry = loaded.model.geometry
    layers = geometry.layers
    kv_dtype = resolve_kv_dtype(config.kv_cache_dtype, loaded.dtype)
    needs = AttentionNeeds(
        dtype=loaded.dtype,
        kv_dtype=kv_dtype,
        page_size=config.page_size,
        needs_unequal_head_dims=geometry.has_unequal_head_dims,
        needs_mla=geometry.latent is not None,
        needs_unlike_layers=any(layer.heads is not None for layer in layers),
        needs_shared_kv=any(layer.kv_layer_id is not None for layer in layers),
        needs_mixed_batches=config.enable_mixed_batches,
        latent=geometry.latent,
    )
    asked = AskedBackends(config.prefill_backend, config.decode_backend)
    choice = choose_routes(asked, detect_device(loaded.device), needs, layers)
    attention_config = replace(
        loaded.attention_config(choice.page_size, kv_dtype),
        has_bounded_accounts=choice.has_bounded_accounts,
    )
    entries = loaded.model.state_entries
    state_bytes = state_bytes_of(config.max_running_requests + num_padding_slots, entries)
    kv_bytes = _kv_budget_bytes(config, attention_config.device)
    num_snapshots = num_snapshots_of(config, loaded.model, kv_bytes - state_bytes)
    state_bytes += num_snapshots * bytes_per_slot(entries)
    pages = pages_by_account(config, attention_config, kv_bytes - state_bytes, state_bytes)
    return AttentionPlan(choice.routes, attention_config, pages, num_snapshots)


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
