"""Parts of the torch kernels that the oracle comparison reaches only by luck."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attention.kernels.torch_decode import MAX_CHUNK_PADDING_TOKENS, cut_into_chunks
from attention.kernels.torch_extend import QUERY_BLOCK, CausalBias, QueryBlock, query_blocks
from attention.kernels.torch_scores import capped_sink_softmax
from attention.memory.layout import CurrentChunk, EveryToken, LastTokens


@given(
    lengths=st.lists(st.integers(1, 5000), max_size=80),
    max_chunk_tokens=st.sampled_from([1, 1000, 8192]),
)
def test_chunks_cover_every_row_once_within_their_bounds(lengths, max_chunk_tokens):
    descending = np.sort(np.array(lengths, dtype=np.int64))[::-1]
    chunks = cut_into_chunks(descending, max_chunk_tokens)
    assert [row for start, stop in chunks for row in range(start, stop)] == list(
        range(len(lengths))
    )
    for start, stop in chunks:
        padded = (stop - start) * int(descending[start])
        assert stop - start == 1 or padded <= max_chunk_tokens
        assert padded - int(descending[start:stop].sum()) <= MAX_CHUNK_PADDING_TOKENS


def test_rows_of_one_length_share_a_chunk():
    assert cut_into_chunks(np.full(16, 512), 8192) == [(0, 16)]


@given(
    num_queries=st.integers(1, 700),
    prefix=st.integers(0, 700),
    retention=st.sampled_from(
        [EveryToken(), LastTokens(1), LastTokens(100), LastTokens(5000)]
        + [CurrentChunk(1), CurrentChunk(7), CurrentChunk(128), CurrentChunk(5000)]
    ),
)
def test_query_blocks_hold_every_query_and_every_key_it_sees(num_queries, prefix, retention):
    blocks = list(query_blocks(num_queries, prefix + num_queries, retention))
    assert blocks[0].first_query == 0
    assert blocks[-1].stop_query == num_queries
    assert all(a.stop_query == b.first_query for a, b in zip(blocks, blocks[1:], strict=False))
    for block in blocks:
        assert 0 < block.stop_query - block.first_query <= QUERY_BLOCK
        assert block.first_key == retention.first_visible(prefix + block.first_query)
        assert block.stop_key == prefix + block.stop_query
        if isinstance(retention, CurrentChunk):  # one mask, causality's, serves the whole block
            assert block.first_key == retention.first_visible(block.stop_key - 1)


@given(
    lengths=st.lists(st.integers(1, 5000), max_size=80),
    max_chunk_tokens=st.sampled_from([1, 1000, 8192]),
)
def test_chunks_of_lengths_in_any_order_keep_their_bounds(lengths, max_chunk_tokens):
    chunks = cut_into_chunks(np.array(lengths, dtype=np.int64), max_chunk_tokens)
    assert [row for start, stop in chunks for row in range(start, stop)] == list(
        range(len(lengths))
    )
    for start, stop in chunks:
        held = lengths[start:stop]
        padded = len(held) * max(held)
        assert stop - start == 1 or padded <= max_chunk_tokens
        assert padded - sum(held) <= MAX_CHUNK_PADDING_TOKENS


@given(
    positions=st.lists(st.integers(0, 10**6), max_size=20),
    retention=st.sampled_from([EveryToken(), LastTokens(7), CurrentChunk(7), CurrentChunk(8192)]),
)
def test_first_visible_of_many_positions_is_that_of_each(positions, retention):
    got = retention.first_visible(np.array(positions, dtype=np.int64)).tolist()
    assert got == [retention.first_visible(position) for position in positions]


@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_sinks_take_their_share_without_overflow(scale):
    scores = torch.randn(3, 4, 6) * scale
    sinks = torch.randn(4, 1) * scale
    joined = torch.cat([scores, sinks.expand(3, 4, 1)], dim=-1).double()
    expected = torch.softmax(joined, dim=-1)[..., :-1]
    weights = capped_sink_softmax(scores.clone(), None, 0.0, sinks)
    torch.testing.assert_close(weights.double(), expected, rtol=1e-4, atol=1e-7)


def test_hidden_keys_weigh_nothing_under_a_cap():
    scores = torch.full((1, 3), 100.0)
    bias = torch.tensor([[0.0, -torch.inf, 0.0]])
    weights = capped_sink_softmax(scores, bias, 5.0, None)
    assert weights.tolist() == [[0.5, 0.0, 0.5]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [-1, 24])
def test_masks_for_a_gpu_begin_at_a_vector_s_boundary(window, dtype):
    """On the meta device: addresses without memory. torch checks strides, not addresses."""
    bias = CausalBias(window, dtype, torch.device("meta"))
    bias.block(QueryBlock(0, QUERY_BLOCK, 0, QUERY_BLOCK + 256))
    for position in range(64):
        mask = bias.block(QueryBlock(0, 9, 0, position + 9))
        assert mask.storage_offset() * mask.itemsize % 16 == 0
        assert mask.shape == (9, position + 9)
