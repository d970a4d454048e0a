"""Decode kernels that only data-centre Blackwell has, as their packages name them.

Loading runs none of them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch

from attention.capability import AttentionBackendError, BackendProbe
from attention.kernels.providers import probe_triton

CUTLASS_MLA_INSTALL = "pip install 'tessera[cuda]' (sglang-kernel 0.4.3 for torch 2.11)"
TRTLLM_INSTALL = "pip install flashinfer-python==0.6.12 flashinfer-cubin==0.6.12"


@dataclass(frozen=True, slots=True)
class CutlassMLA:
    """sgl_kernel's cutlass_mla_decode, and cutlass_mla_get_workspace_size: bytes for (tokens that
    the page table has room for, rows)."""

    attend: Callable[..., torch.Tensor]
    workspace_bytes: Callable[[int, int], int]


def load_cutlass_mla() -> CutlassMLA:
    """Raises AttentionBackendError when sglang-kernel is missing or does not load."""
    module = _import("sgl_kernel", CUTLASS_MLA_INSTALL)
    return CutlassMLA(module.cutlass_mla_decode, module.cutlass_mla_get_workspace_size)


def probe_cutlass_mla() -> BackendProbe:
    """Whether the package loads here, and Triton, whose kernels compute prompts for it."""
    return _probe(load_cutlass_mla)


def load_trtllm_mla() -> Callable[..., torch.Tensor]:
    """flashinfer's trtllm_batch_decode_with_kv_cache_mla. Raises AttentionBackendError when the
    package is missing or does not load."""
    module = _import("flashinfer.mla", TRTLLM_INSTALL)
    attend: Callable[..., torch.Tensor] = module.trtllm_batch_decode_with_kv_cache_mla
    return attend


def probe_trtllm_mla() -> BackendProbe:
    """As probe_cutlass_mla."""
    return _probe(load_trtllm_mla)


def load_trtllm_mha() -> Callable[..., torch.Tensor]:
    """flashinfer's trtllm_batch_decode_with_kv_cache. Raises AttentionBackendError when the package
    is missing or does not load."""
    module = _import("flashinfer.decode", TRTLLM_INSTALL)
    attend: Callable[..., torch.Tensor] = module.trtllm_batch_decode_with_kv_cache
    return attend


def probe_trtllm_mha() -> BackendProbe:
    """As probe_cutlass_mla."""
    return _probe(load_trtllm_mha)


def _probe(load: Callable[[], object]) -> BackendProbe:
    try:
        load()
    except AttentionBackendError as error:
        return BackendProbe(is_available=False, missing=str(error))
    return probe_triton()


def _import(module: str, install: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except (ImportError, OSError, RuntimeError) as error:
        raise AttentionBackendError(
            f"{module} does not load here: {error}. To install: {install}"
        ) from error
