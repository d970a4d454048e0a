"""What a rank of a model keeps in memory, and what fits beside it."""

from dataclasses import dataclass, replace

import torch

from attention.config import AttentionConfig
from workers.config import EngineConfig
from workers.errors import ConfigError
from workers.models.base import AttentionGeometry
from workers.runner.kv_memory import resolve_kv_dtype
from workers.survey.fit import Fit, fit_on_gpu, kv_bytes_beside
from workers.survey.kept import KeptGroup, KeptStates, kept_groups, kept_states
from workers.survey.meta_model import MetaModel

PAGE_SIZE = 64
"""Tokens a page where the configuration names none: what it is in the end, the backend says."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Of one of tp_size ranks. adapter_bytes: of the slots of adapters. kv_bytes_a_token: of
    account 0 and of all accounts; both None where only a run shows it. states: None where there are
    none, or where states_are_known is not so. why_no_fit: of a GPU that was asked for, "" where
    there is a fit or nobody asked; fitting_tp_sizes: which larger ones would do then."""

    weight_bytes: int
    adapter_bytes: int
    kv_bytes_a_token: int | None
    kv_bytes_a_token_in_view: int | None
    groups: tuple[KeptGroup, ...]
    states: KeptStates | None
    states_are_known: bool
    fit: Fit | None
    why_no_fit: str = ""
    fitting_tp_sizes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class AskedFit:
    """Of one GPU."""

    gpu_memory_gib: float
    request_tokens: int


def memory_of(
    config: EngineConfig,
    meta: MetaModel,
    dtype: torch.dtype,
    max_context_len: int,
    asked: AskedFit | None,
) -> Memory:
    """dtype: of weights and activations. Without fitting_tp_sizes."""
    attention = _attention_of(config, meta.geometry, dtype, max_context_len)
    fit, why_no_fit = None, ""
    if asked is not None:
        try:
            fit = _fit(config, meta, attention, asked)
        except ConfigError as error:
            why_no_fit = str(error)
    return Memory(
        meta.weight_bytes,
        meta.adapter_bytes,
        None if attention is None else attention.kv_bytes_of_account(0),
        None if attention is None else attention.kv_bytes_per_token,
        () if attention is None else kept_groups(attention),
        kept_states(meta.state_entries),
        meta.state_entries is not None,
        fit,
        why_no_fit,
    )


def _fit(
    config: EngineConfig, meta: MetaModel, attention: AttentionConfig | None, asked: AskedFit
) -> Fit | None:
    """None where only a run shows what tokens take. Raises ConfigError where nothing fits."""
    if attention is None:
        kv_bytes_beside(config, meta, asked.gpu_memory_gib)
        return None
    return fit_on_gpu(config, attention, meta, asked.gpu_memory_gib, asked.request_tokens)


def _attention_of(
    config: EngineConfig,
    geometry: AttentionGeometry | None,
    dtype: torch.dtype,
    max_context_len: int,
) -> AttentionConfig | None:
    if geometry is None:
        return None
    kv_dtype = resolve_kv_dtype(config.kv_cache_dtype, dtype)
    page_size, device = config.page_size or PAGE_SIZE, torch.device("meta")
    attention = geometry.attention_config(max_context_len, page_size, dtype, kv_dtype, device)
    return replace(attention, has_bounded_accounts=True)
