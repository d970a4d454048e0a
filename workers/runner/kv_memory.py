"""A rank's KV pool, in the dtype that was asked for, with the checkpoint's scales where it has any.

Knows dtypes and scales. Knows no file, no page count and no request.
"""

import logging
from collections.abc import Sequence

import torch

from attention.config import AttentionConfig
from attention.memory.cuda_kv_pool import create_mha_pool
from attention.memory.fp8_kv_pool import Fp8MHATokenToKVPool
from attention.memory.grouped_kv_pool import GroupedTokenToKVPool
from attention.memory.latent_kv_pool import LatentTokenToKVPool
from attention.memory.token_to_kv_pool import TokenToKVPool
from workers.config import KVCacheDType
from workers.loading.kv_scales import KVScale

logger = logging.getLogger(__name__)


def resolve_kv_dtype(requested: KVCacheDType, model_dtype: torch.dtype) -> torch.dtype:
    """EngineConfig.kv_cache_dtype; "auto" is the model's own dtype."""
    return torch.float8_e4m3fn if requested == "fp8_e4m3" else model_dtype


def create_kv_pool(
    config: AttentionConfig, pages_by_account: Sequence[int], kv_scales: Sequence[KVScale]
) -> TokenToKVPool:
    """The pool of a rank. pages_by_account: of account 0, then of the bounded ones, then the
    encoder's. kv_scales: one a layer, or none.

    An fp8 pool without scales keeps 1, with a warning: K and V are then rounded as they come.
    Raises AttentionBackendError when the device lacks what the pool needs.
    """
    if config.num_accounts > 1 or not config.keeps_one_entry:
        return GroupedTokenToKVPool(config, pages_by_account, create_mha_pool)
    num_pages = pages_by_account[0]
    if config.latent is not None:
        return LatentTokenToKVPool(config, num_pages)
    pool = create_mha_pool(config, num_pages)
    if not isinstance(pool, Fp8MHATokenToKVPool):
        if kv_scales:
            logger.info(
                "the checkpoint has scales for an FP8 KV cache; kv_cache_dtype=fp8_e4m3 uses them"
            )
        return pool
    if not kv_scales:
        logger.warning(
            "the checkpoint has no scales for an FP8 KV cache: 1.0 is used for every layer, which "
            "may cost accuracy"
        )
    for layer_id, scale in enumerate(kv_scales):
        pool.set_scales(layer_id, scale.k, scale.v)
    return pool
