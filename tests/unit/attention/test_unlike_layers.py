"""Layers that differ in heads, in what they see and in whose K and V they read, in one step."""

from dataclasses import replace

import pytest
import torch

from attention import AttentionHeads, LayerAttentionConfig, RadixAttention
from attention.backends.base import AttentionBackend
from attention.backends.torch_native import TorchNativeBackend
from attention.capability import AttentionBackendError
from attention.features import Feature
from attention.memory.grouped_kv_pool import GroupedTokenToKVPool
from attention.memory.token_to_kv_pool import MHATokenToKVPool
from attention.oracle import OracleBackend
from tests.proofs.cells import proves
from tests.unit.attention.cases import CaseSpec, build_case, relative_error, rows_of

WIDE = AttentionHeads(4, 1, 48, 24)
LAYERS = (
    LayerAttentionConfig(),
    LayerAttentionConfig(chunk_size=16),
    LayerAttentionConfig(sliding_window_size=9, heads=WIDE),
    LayerAttentionConfig(kv_layer_id=0, logit_cap=1.5),
    LayerAttentionConfig(sliding_window_size=9, heads=WIDE, kv_layer_id=2),
    LayerAttentionConfig(chunk_size=16, kv_layer_id=1),
    LayerAttentionConfig(heads=WIDE),
)
STEPS = {
    "decode": rows_of((0, 1), (15, 1), (16, 1), (300, 1)),
    "extend": rows_of((0, 40), (15, 3), (7, 130)),
    "mixed": rows_of((40, 1), (0, 33), (255, 1), (17, 9)),
}


def config_of(page_size: int, rows=STEPS["mixed"]):
    case = build_case(CaseSpec(rows, page_size=page_size))
    return case, replace(case.config, num_layers=len(LAYERS), layers=LAYERS)


def radix_layer(config, layer_id: int) -> RadixAttention:
    heads, own = config.heads_of(layer_id), config.layers[layer_id]
    layer = RadixAttention(
        heads.tp_q_head_num,
        heads.head_dim,
        heads.head_dim**-0.5,
        heads.tp_k_head_num,
        layer_id,
        v_head_dim=heads.v_head_dim,
        logit_cap=own.logit_cap,
        sliding_window_size=own.sliding_window_size,
    )
    layer.chunk_size = own.chunk_size
    layer.stores_kv = own.kv_layer_id is None
    return layer


def fill(pool: GroupedTokenToKVPool) -> None:
    """Every token of every layer that stores any, as a cached prefix would have left it."""
    torch.manual_seed(3)
    for layer_id, layer in enumerate(LAYERS):
        if layer.kv_layer_id is None:
            for buffer in pool.get_kv_buffer(layer_id):
                buffer.copy_(torch.randn_like(buffer))


def run_all(backend_class: type[AttentionBackend], page_size: int, rows) -> list[torch.Tensor]:
    case, config = config_of(page_size, rows)
    pool = GroupedTokenToKVPool(config, (case.token_to_kv_pool.num_pages,), MHATokenToKVPool)
    fill(pool)
    backend = backend_class(config, case.req_to_token_pool, pool)
    batch = replace(case.batch, attn_backend=backend)
    backend.init_forward_metadata(batch)
    outs = []
    for layer_id in range(config.num_layers):
        torch.manual_seed(layer_id)
        heads, layer = config.heads_of(layer_id), radix_layer(config, layer_id)
        q, k, v = (
            torch.randn(batch.num_tokens, num, dim)
            for num, dim in (
                (heads.tp_q_head_num, heads.head_dim),
                (heads.tp_k_head_num, heads.head_dim),
                (heads.tp_k_head_num, heads.v_head_dim),
            )
        )
        if not layer.stores_kv:
            k, v = torch.full_like(k, torch.nan), torch.full_like(v, torch.nan)
        outs.append(layer(q, k, v, batch))
    return outs


@proves("torch_native", Feature.UNLIKE_LAYERS, Feature.SHARED_KV)
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("rows", STEPS.values(), ids=STEPS.keys())
def test_every_layer_agrees_with_oracle(page_size, rows):
    wanted = run_all(OracleBackend, page_size, rows)
    got = run_all(TorchNativeBackend, page_size, rows)
    assert len(got) == len(LAYERS)
    for layer_id, (one, other) in enumerate(zip(got, wanted, strict=True)):
        assert relative_error(one, other) < 1e-5, layer_id


def test_a_pool_has_memory_for_layers_that_store_and_no_other():
    _, config = config_of(page_size=4)
    pool = GroupedTokenToKVPool(config, (5,), MHATokenToKVPool)
    assert pool.num_bytes == 5 * GroupedTokenToKVPool.bytes_per_page(config)
    elements = 2 * 4 * (32 + 32) + 2 * 1 * (48 + 24)
    assert GroupedTokenToKVPool.bytes_per_page(config) == 4 * elements * 4
    for reader, source in ((3, 0), (4, 2), (5, 1)):
        pairs = zip(pool.get_kv_buffer(reader), pool.get_kv_buffer(source), strict=True)
        assert all(one.data_ptr() == other.data_ptr() for one, other in pairs)
    stored = {pool.get_kv_buffer(layer_id)[0].data_ptr() for layer_id in (0, 1, 2, 6)}
    assert len(stored) == 4
    assert pool.get_kv_buffer(2)[0].shape == (5, 4, 1, 48)
    assert pool.get_kv_buffer(2)[1].shape == (5, 4, 1, 24)


def test_clearing_reaches_every_group():
    _, config = config_of(page_size=4)
    pool = GroupedTokenToKVPool(config, (5,), MHATokenToKVPool)
    fill(pool)
    pool.clear_tokens(torch.tensor([4, 9]))
    for layer_id in range(config.num_layers):
        for buffer in pool.get_kv_buffer(layer_id):
            tokens = buffer.flatten(0, 1)
            assert not tokens[[4, 9]].any()
            assert tokens[[5, 8, 10]].all()


def test_writing_for_a_layer_that_stores_nothing_is_refused():
    _, config = config_of(page_size=4)
    pool = GroupedTokenToKVPool(config, (5,), MHATokenToKVPool)
    k = torch.zeros(1, 4, 32)
    with pytest.raises(ValueError, match="layer 3 stores no K and V"):
        pool.set_kv_buffer(3, torch.tensor([4]), k, k)


def test_an_fp8_cache_is_refused():
    _, config = config_of(page_size=4)
    with pytest.raises(AttentionBackendError, match="FP8"):
        GroupedTokenToKVPool(replace(config, kv_dtype=torch.float8_e4m3fn), (5,), MHATokenToKVPool)
