"""Which pool a rank gets for what its layers keep."""

import pytest
import torch

from attention import AttentionConfig, AttentionHeads, LatentEntry, LayerAttentionConfig
from attention.memory.grouped_kv_pool import GroupedTokenToKVPool
from attention.memory.latent_kv_pool import LatentTokenToKVPool
from attention.memory.token_to_kv_pool import MHATokenToKVPool, TokenToKVPool
from workers.models.base import AttentionGeometry
from workers.runner.kv_memory import create_kv_pool

PLAIN = LayerAttentionConfig()
WINDOW = LayerAttentionConfig(sliding_window_size=4)
CHUNKS = LayerAttentionConfig(chunk_size=4)
SAME_HEADS = LayerAttentionConfig(heads=AttentionHeads(16, 2, 8, 8))
WIDE = LayerAttentionConfig(heads=AttentionHeads(8, 2, 16, 16))
READER = LayerAttentionConfig(kv_layer_id=0)


def config_of(*layers: LayerAttentionConfig) -> AttentionConfig:
    geometry = AttentionGeometry(8, 2, 8, 8, layers)
    return geometry.attention_config(64, 4, torch.float32, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize(
    ("layers", "pool_class"),
    [
        ((PLAIN, PLAIN), MHATokenToKVPool),
        ((PLAIN, WINDOW, CHUNKS), MHATokenToKVPool),
        ((PLAIN, SAME_HEADS), MHATokenToKVPool),
        ((PLAIN, WIDE), GroupedTokenToKVPool),
        ((PLAIN, READER), GroupedTokenToKVPool),
    ],
)
def test_models_whose_layers_keep_alike_get_one_plain_pool(
    layers: tuple[LayerAttentionConfig, ...], pool_class: type[TokenToKVPool]
) -> None:
    config = config_of(*layers)
    pool = create_kv_pool(config, (3,), ())
    assert type(pool) is pool_class
    assert pool.num_bytes == 3 * config.kv_bytes_per_token * config.page_size


def test_a_model_that_declares_latents_gets_a_pool_of_latents() -> None:
    geometry = AttentionGeometry(8, 8, 24, 16, (PLAIN, PLAIN), LatentEntry(32, 8))
    device = torch.device("cpu")
    config = geometry.attention_config(64, 4, torch.float32, torch.float32, device)
    pool = create_kv_pool(config, (3,), ())
    assert type(pool) is LatentTokenToKVPool
    assert pool.num_bytes == 2 * 3 * 4 * 40 * 4
