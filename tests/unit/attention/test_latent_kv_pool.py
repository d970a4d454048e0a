"""The pool of latents: its layout, its bytes, and what it refuses."""

from dataclasses import replace

import pytest
import torch

from attention import AttentionConfig, LatentEntry, LayerAttentionConfig
from attention.capability import AttentionBackendError
from attention.memory.latent_kv_pool import LatentTokenToKVPool
from attention.memory.token_to_kv_pool import MHATokenToKVPool


def config_of(num_layers: int = 27, page_size: int = 16) -> AttentionConfig:
    """DeepSeek-V2-Lite's attention on one rank."""
    return AttentionConfig(
        num_layers=num_layers,
        tp_q_head_num=16,
        tp_k_head_num=16,
        head_dim=192,
        v_head_dim=128,
        max_context_len=256,
        page_size=page_size,
        dtype=torch.bfloat16,
        kv_dtype=torch.bfloat16,
        device=torch.device("cpu"),
        layers=(LayerAttentionConfig(),) * num_layers,
        latent=LatentEntry(latent_dim=512, rope_dim=64),
    )


def test_deepseek_v2_lite_keeps_576_elements_a_token_and_layer():
    config = config_of()
    pool = LatentTokenToKVPool(config, num_pages=5)
    num_tokens = 5 * 16
    assert pool.num_bytes == 27 * num_tokens * 576 * 2
    assert LatentTokenToKVPool.bytes_per_page(config) * 5 == pool.num_bytes
    heads = replace(config, latent=None)
    assert MHATokenToKVPool.bytes_per_page(heads) == 16 * 27 * 16 * (192 + 128) * 2


def test_more_heads_or_ranks_do_not_change_the_bytes():
    config = config_of()
    share = replace(config, tp_q_head_num=2, tp_k_head_num=2)
    assert LatentTokenToKVPool.bytes_per_page(share) == LatentTokenToKVPool.bytes_per_page(config)


def test_latents_lie_before_the_rotated_part_and_read_back_as_written():
    pool = LatentTokenToKVPool(config_of(num_layers=3), num_pages=4)
    assert not pool.get_latent(1).any()
    locations = torch.tensor([17, 40])
    latent, rope = torch.randn(2, 512), torch.randn(2, 64)
    pool.set_latent(1, locations, latent, rope)
    pages = pool.get_latent(1)
    assert pages.shape == (4, 16, 576)
    for row, location in enumerate(locations.tolist()):
        token = pages[location // 16, location % 16]
        assert torch.equal(token[:512], latent[row].bfloat16())
        assert torch.equal(token[512:], rope[row].bfloat16())
    assert int((pages != 0).any(dim=-1).sum()) == 2
    assert not pool.get_latent(0).any()
    assert not pool.get_latent(2).any()


def test_cleared_tokens_are_zero_in_every_layer_and_others_stay():
    pool = LatentTokenToKVPool(config_of(num_layers=2), num_pages=4)
    for layer_id in range(2):
        pool.get_latent(layer_id).fill_(torch.nan)
    pool.clear_tokens(torch.tensor([5, 33]))
    for layer_id in range(2):
        is_clear = (pool.get_latent(layer_id).flatten(0, 1) == 0).all(dim=-1)
        assert is_clear.nonzero().flatten().tolist() == [5, 33]


def test_what_asks_for_heads_is_refused():
    pool = LatentTokenToKVPool(config_of(num_layers=1), num_pages=2)
    with pytest.raises(AttentionBackendError, match="holds latents"):
        pool.get_kv_buffer(0)
    with pytest.raises(AttentionBackendError, match="holds latents"):
        pool.set_kv_buffer(0, torch.tensor([1]), torch.zeros(1, 1, 1), torch.zeros(1, 1, 1))


def test_a_config_without_latents_or_in_fp8_makes_no_pool():
    with pytest.raises(AttentionBackendError, match="no latents"):
        LatentTokenToKVPool(replace(config_of(), latent=None), num_pages=2)
    with pytest.raises(AttentionBackendError, match="float8_e4m3fn"):
        LatentTokenToKVPool(replace(config_of(), kv_dtype=torch.float8_e4m3fn), num_pages=2)
