"""Both levels of KV memory: shapes, writes, sizes."""

import pytest
import torch

from attention import AttentionConfig, LayerAttentionConfig
from attention.memory.fp8_kv_pool import Fp8MHATokenToKVPool
from attention.memory.req_to_token_pool import ReqToTokenPool
from attention.memory.token_to_kv_pool import MHATokenToKVPool

CPU = torch.device("cpu")


def make_config(**changes):
    facts = {
        "num_layers": 3,
        "tp_q_head_num": 4,
        "tp_k_head_num": 2,
        "head_dim": 8,
        "v_head_dim": 6,
        "max_context_len": 64,
        "page_size": 4,
        "dtype": torch.float32,
        "kv_dtype": torch.float32,
        "device": CPU,
    } | changes
    return AttentionConfig(**facts, layers=(LayerAttentionConfig(),) * facts["num_layers"])


def test_kv_buffers_have_the_contracted_shapes():
    k, v = MHATokenToKVPool(make_config(), num_pages=5).get_kv_buffer(2)
    assert k.shape == (5, 4, 2, 8)
    assert v.shape == (5, 4, 2, 6)


@pytest.mark.parametrize("page_size", [1, 16, 256])
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16])
def test_bytes_per_page_times_pages_is_what_the_pool_holds(page_size, kv_dtype):
    config = make_config(page_size=page_size, kv_dtype=kv_dtype)
    pool = MHATokenToKVPool(config, num_pages=7)
    k, v = pool.get_kv_buffer(0)
    assert pool.num_bytes == 7 * MHATokenToKVPool.bytes_per_page(config)
    assert pool.num_bytes == config.num_layers * (k.nbytes + v.nbytes)


def test_a_written_token_is_found_at_page_times_size_plus_offset_of_its_layer_only():
    pool = MHATokenToKVPool(make_config(), num_pages=5)
    new_k, new_v = torch.randn(2, 2, 8), torch.randn(2, 2, 6)
    pool.set_kv_buffer(1, torch.tensor([3 * 4 + 2, 1 * 4 + 0]), new_k, new_v)
    k, v = pool.get_kv_buffer(1)
    for i, (page, offset) in enumerate([(3, 2), (1, 0)]):
        assert torch.equal(k[page, offset], new_k[i])
        assert torch.equal(v[page, offset], new_v[i])
    assert k.count_nonzero() == new_k.numel()
    assert v.count_nonzero() == new_v.numel()
    for other in (0, 2):
        assert all(buffer.count_nonzero() == 0 for buffer in pool.get_kv_buffer(other))


def test_writes_convert_to_the_pools_dtype_and_leave_the_source_alone():
    pool = MHATokenToKVPool(make_config(kv_dtype=torch.bfloat16), num_pages=2)
    new_k, new_v = torch.randn(1, 2, 8), torch.randn(1, 2, 6)
    kept = new_k.clone()
    pool.set_kv_buffer(0, torch.tensor([5]), new_k, new_v)
    assert torch.equal(pool.get_kv_buffer(0)[0][1, 1], new_k[0].to(torch.bfloat16))
    assert torch.equal(new_k, kept)


def test_writes_take_strided_slices_of_a_fused_projection():
    pool = MHATokenToKVPool(make_config(v_head_dim=8), num_pages=2)
    fused = torch.randn(3, 2 * 8 + 2 * 8)
    k, v = fused[:, :16].view(3, 2, 8), fused[:, 16:].view(3, 2, 8)
    pool.set_kv_buffer(0, torch.tensor([4, 5, 6]), k, v)
    assert torch.equal(pool.get_kv_buffer(0)[0][1, :3], k)
    assert torch.equal(pool.get_kv_buffer(0)[1][1, :3], v)


def test_fresh_memory_is_zero_and_aligned_to_cache_lines():
    pool = MHATokenToKVPool(make_config(), num_pages=9)
    k, v = pool.get_kv_buffer(0)
    assert k.count_nonzero() == v.count_nonzero() == 0
    assert k.data_ptr() % 64 == v.data_ptr() % 64 == 0


def test_a_pool_needs_a_page_beyond_the_reserved_one():
    with pytest.raises(ValueError, match="num_pages"):
        MHATokenToKVPool(make_config(), num_pages=1)
    assert MHATokenToKVPool(make_config(), num_pages=2).num_pages == 2


def test_table_starts_on_the_dummy_page_and_keeps_what_is_written():
    table = ReqToTokenPool(3, 10, CPU)
    assert table.req_to_token.shape == (3, 10)
    assert table.req_to_token.dtype == torch.int32
    assert table.req_to_token.count_nonzero() == 0
    table.write(torch.tensor([1]), 4, torch.tensor([9, 8, 7], dtype=torch.int32))
    assert table.req_to_token[1].tolist() == [0, 0, 0, 0, 9, 8, 7, 0, 0, 0]
    assert table.req_to_token[[0, 2]].count_nonzero() == 0
    assert table.num_bytes == 3 * 10 * 4


def test_several_slots_are_given_the_same_entries_in_one_call():
    table = ReqToTokenPool(4, 10, CPU)
    table.write(torch.tensor([3, 0]), 7, torch.tensor([40, 41, 42], dtype=torch.int32))
    for slot in (0, 3):
        assert table.req_to_token[slot].tolist() == [0] * 7 + [40, 41, 42]
    assert table.req_to_token[1:3].count_nonzero() == 0


@pytest.mark.parametrize("shape", [(0, 10), (3, 0)])
def test_an_empty_table_is_refused(shape):
    with pytest.raises(ValueError, match="positive"):
        ReqToTokenPool(*shape, CPU)


@pytest.mark.parametrize(
    ("pool_class", "kv_dtype"),
    [
        (MHATokenToKVPool, torch.float32),
        (MHATokenToKVPool, torch.bfloat16),
        (Fp8MHATokenToKVPool, torch.float8_e4m3fn),
    ],
)
def test_cleared_tokens_are_zero_in_every_layer_and_the_others_stay(pool_class, kv_dtype):
    pool = pool_class(make_config(kv_dtype=kv_dtype), num_pages=3)
    everywhere, cleared = torch.arange(12), [5, 11]
    for layer in range(3):
        nan = torch.full((12, 2, 8), torch.nan)
        pool.set_kv_buffer(layer, everywhere, nan, nan[..., :6])
    pool.clear_tokens(torch.tensor(cleared))
    for layer in range(3):
        for buffer in pool.get_kv_buffer(layer):
            tokens = buffer.float().flatten(0, 1)
            assert not tokens[cleared].any()
            assert tokens[[i for i in range(12) if i not in cleared]].isnan().all()
