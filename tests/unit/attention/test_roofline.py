"""Byte and operation counts against counting by hand, one query and one key at a time."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention import AttentionConfig, LayerAttentionConfig
from attention.roofline import AttentionCost, HardwareLimits, attention_step_cost


def config_with(*windows):
    return AttentionConfig(
        num_layers=len(windows),
        tp_q_head_num=8,
        tp_k_head_num=2,
        head_dim=16,
        v_head_dim=12,
        max_context_len=4096,
        page_size=16,
        dtype=torch.bfloat16,
        kv_dtype=torch.bfloat16,
        device=torch.device("cpu"),
        layers=tuple(LayerAttentionConfig(sliding_window_size=window) for window in windows),
    )


def cost_of(config, rows):
    prefix = np.array([row[0] for row in rows], dtype=np.int32)
    new = np.array([row[1] for row in rows], dtype=np.int32)
    return attention_step_cost(config, prefix + new, new)


def counted_cost(config, rows):
    bytes_read, flops = 0, 0
    for layer in config.layers:
        window = layer.sliding_window_size
        for prefix, new in rows:
            seen = set()
            for position in range(prefix, prefix + new):
                first = 0 if window < 0 else max(0, position - window + 1)
                keys = range(first, position + 1)
                seen.update(keys)
                flops += (
                    2 * config.tp_q_head_num * (config.head_dim + config.v_head_dim) * len(keys)
                )
            bytes_read += len(seen) * config.kv_bytes_per_token // config.num_layers
    return AttentionCost(bytes_read, flops)


@settings(max_examples=100, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 30)), max_size=5),
    windows=st.lists(st.sampled_from([-1, 1, 2, 16, 50, 1000]), min_size=1, max_size=4),
)
def test_cost_equals_what_counting_every_pair_gives(rows, windows):
    config = config_with(*windows)
    assert cost_of(config, rows) == counted_cost(config, rows)


def test_lengths_whose_squares_exceed_int32_do_not_overflow():
    length = 200_000
    config = config_with(-1)
    pairs = length * (length + 1) // 2
    assert cost_of(config, [(0, length)]).flops == 2 * 8 * 28 * pairs


def test_the_least_time_is_that_of_the_slower_limit():
    assert HardwareLimits(500.0, 6000.0).minimum_seconds(1000, 6000) == pytest.approx(2.0)
    assert HardwareLimits(1e9, 1500.0).minimum_seconds(1000, 6000) == pytest.approx(4.0)
    assert HardwareLimits(100.0, 6000.0).minimum_seconds(1000, 6000) == pytest.approx(10.0)
