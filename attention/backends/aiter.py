"""aiter: a name that people ask for, of AMD's kernels, and what it would take to have them.

Nothing of it is built in this repository. It is registered so that whoever asks for it, and
whoever reads the table of backends, is told why, and that no choice is ever made of it.
"""

from __future__ import annotations

from typing import NoReturn

import torch

from attention.backends.base import AttentionBackend
from attention.capability import AttentionBackendError, BackendCapability, BackendProbe
from attention.config import AttentionConfig
from attention.features import Feature
from attention.forward_batch import AttentionLayer, ForwardBatch
from attention.memory.req_to_token_pool import ReqToTokenPool
from attention.memory.token_to_kv_pool import TokenToKVPool
from attention.registration import register_attention_backend

_NEEDS = (
    "nothing of it is built here; it takes an AMD GPU (gfx942 or gfx950), torch built for ROCm, "
    "AMD's package aiter, and a backend over its paged attention that nobody has written and proved"
)
_PAGE_SIZE = 16


@register_attention_backend("aiter")
class AiterBackend(AttentionBackend):
    """Cannot be made: AttentionBackendError."""

    capability: BackendCapability = BackendCapability(
        name="aiter",
        device_types=("rocm",),
        min_compute_capability=None,
        max_compute_capability=None,
        dtypes=(torch.bfloat16, torch.float16),
        kv_dtypes=(torch.bfloat16, torch.float16),
        page_sizes=(_PAGE_SIZE,),
        default_page_size=_PAGE_SIZE,
        has_sliding_window=False,
        has_logit_cap=False,
        has_sinks=False,
        has_unequal_head_dims=False,
        has_mixed_batches=False,
        has_mla=False,
        has_heads=False,
        is_built=False,
        install_hint=_NEEDS,
        why_not=dict.fromkeys(Feature, "nothing of it is built here"),
    )

    @classmethod
    def probe(cls) -> BackendProbe:
        return BackendProbe(is_available=False, missing=_NEEDS)

    def __init__(
        self,
        config: AttentionConfig,
        req_to_token_pool: ReqToTokenPool,
        token_to_kv_pool: TokenToKVPool,
    ) -> None:
        raise AttentionBackendError(_NEEDS)

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> NoReturn:
        raise AttentionBackendError(_NEEDS)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> NoReturn:
        raise AttentionBackendError(_NEEDS)
