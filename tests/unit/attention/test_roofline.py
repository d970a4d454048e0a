"""Byte and operation counts against counting by hand, one query and one key at a time."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention import AttentionConfig, AttentionHeads, LatentEntry, LayerAttentionConfig
from attention.roofline import AttentionCost, HardwareLimits, attention_step_cost


def windowed(*windows):
    return tuple(LayerAttentionConfig(sliding_window_size=window) for window in windows)


def config_with(*layers):
    return AttentionConfig(
        num_layers=len(layers),
        tp_q_head_num=8,
        tp_k_head_num=2,
        head_dim=16,
        v_head_dim=12,
        max_context_len=4096,
        page_size=16,
        dtype=torch.bfloat16,
        kv_dtype=torch.bfloat16,
        device=torch.device("cpu"),
        layers=layers,
    )


def cost_of(config, rows):
    prefix = np.array([row[0] for row in rows], dtype=np.int32)
    new = np.array([row[1] for row in rows], dtype=np.int32)
    return attention_step_cost(config, prefix + new, new)


def counted_cost(config, rows):
    bytes_read, flops = 0, 0
    for layer_id, layer in enumerate(config.layers):
        heads = config.heads_of(layer_id)
        dims = heads.head_dim + heads.v_head_dim
        for prefix, new in rows:
            seen = set()
            for position in range(prefix, prefix + new):
                window, chunk = layer.sliding_window_size, layer.chunk_size
                first = 0 if window < 0 else max(0, position - window + 1)
                first = first if chunk < 0 else position // chunk * chunk
                keys = range(first, position + 1)
                seen.update(keys)
                flops += 2 * heads.tp_q_head_num * dims * len(keys)
            bytes_read += len(seen) * heads.tp_k_head_num * dims * config.kv_dtype.itemsize
    return AttentionCost(bytes_read, flops)


LAYERS = (
    *windowed(-1, 1, 2, 16, 50, 1000),
    *(LayerAttentionConfig(chunk_size=size) for size in (1, 2, 16, 50, 1000)),
    LayerAttentionConfig(heads=AttentionHeads(4, 4, 32, 8)),
    LayerAttentionConfig(chunk_size=16, heads=AttentionHeads(4, 1, 8, 8)),
)


@settings(max_examples=100, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 30)), max_size=5),
    layers=st.lists(st.sampled_from(LAYERS), min_size=1, max_size=4),
)
def test_cost_equals_what_counting_every_pair_gives(rows, layers):
    config = config_with(*layers)
    assert cost_of(config, rows) == counted_cost(config, rows)


def test_lengths_whose_squares_exceed_int32_do_not_overflow():
    length = 200_000
    config = config_with(LayerAttentionConfig())
    pairs = length * (length + 1) // 2
    assert cost_of(config, [(0, length)]).flops == 2 * 8 * 28 * pairs


def test_the_least_time_is_that_of_the_slower_limit():
    assert HardwareLimits(500.0, 6000.0).minimum_seconds(1000, 6000) == pytest.approx(2.0)
    assert HardwareLimits(1e9, 1500.0).minimum_seconds(1000, 6000) == pytest.approx(4.0)
    assert HardwareLimits(100.0, 6000.0).minimum_seconds(1000, 6000) == pytest.approx(10.0)


def test_latents_are_read_once_and_single_tokens_attend_to_them_as_they_lie():
    """3 layers, 8 heads of 24 + 12, a latent of 20 + 4: a decode row of 10 keys and a prompt of 3
    tokens on 5."""
    plain = config_with(*[LayerAttentionConfig()] * 3)
    config = replace(plain, tp_k_head_num=8, head_dim=24, latent=LatentEntry(20, 4))
    absorbed = 10 * (20 + 4 + 20)
    over_heads = (6 + 7 + 8) * (24 + 12)
    expected = AttentionCost(
        bytes_read=3 * (10 + 8) * 24 * 2, flops=2 * 8 * 3 * (absorbed + over_heads)
    )
    assert cost_of(config, [(9, 1), (5, 3)]) == expected
