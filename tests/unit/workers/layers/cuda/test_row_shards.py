"""Which rows a rank keeps, which way a number of tokens goes: alike on all ranks, no row twice."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.layers.cuda.row_shards import (
    ONE_SHOT_BYTES_OF_MORE_RANKS,
    ONE_SHOT_BYTES_OF_TWO_RANKS,
    TWO_SHOT_BYTES,
    TWO_SHOT_TOKENS,
    RowShards,
    StreamLimits,
)

ROW_BYTES = 8192 * 2
"""Of Llama-3.1-70B in bf16."""


@given(size=st.integers(1, 8), num_rows=st.integers(0, 600))
def test_every_row_is_of_one_rank_in_the_order_of_the_ranks(size: int, num_rows: int) -> None:
    owned = [row for rank in range(size) for row in RowShards(rank, size).own(num_rows)]
    assert owned == list(range(num_rows))


@given(size=st.integers(1, 8), num_rows=st.integers(1, 600), data=st.data())
def test_a_rows_owner_follows_from_the_most_rows_a_rank(size: int, num_rows: int, data) -> None:
    row = data.draw(st.integers(0, num_rows - 1))
    owner = row // RowShards(0, size).rows_a_rank(num_rows)
    assert row in RowShards(owner, size).own(num_rows)


@given(size=st.integers(1, 8), num_rows=st.integers(0, 600))
def test_no_rank_has_more_rows_than_programs_are_started_for(size: int, num_rows: int) -> None:
    most = RowShards(0, size).rows_a_rank(num_rows)
    assert max(len(RowShards(rank, size).own(num_rows)) for rank in range(size)) == most


def test_two_ranks_share_no_rows() -> None:
    limits = StreamLimits.of_ranks(2, ROW_BYTES)
    assert limits.one_shot_tokens == ONE_SHOT_BYTES_OF_TWO_RANKS // ROW_BYTES
    assert not limits.has_two_shot
    assert not any(limits.is_sharded(num_tokens) for num_tokens in (1, 4096, 4097, 8192))


@pytest.mark.parametrize("size", [3, 4, 8])
def test_more_ranks_share_rows_between_the_limits(size: int) -> None:
    limits = StreamLimits.of_ranks(size, ROW_BYTES)
    most = ONE_SHOT_BYTES_OF_MORE_RANKS // ROW_BYTES
    assert limits.has_two_shot
    assert not limits.is_sharded(most)
    assert limits.is_sharded(most + 1)
    assert limits.is_sharded(8192)
    assert not limits.is_sharded(8193)


@given(size=st.integers(2, 8), row_bytes=st.integers(2, 1 << 28))
def test_buffers_stay_within_their_bytes_but_for_a_row(size: int, row_bytes: int) -> None:
    limits = StreamLimits.of_ranks(size, row_bytes)
    assert 1 <= limits.one_shot_tokens <= limits.two_shot_tokens
    if limits.has_two_shot:
        assert limits.two_shot_tokens <= TWO_SHOT_TOKENS
        assert limits.two_shot_tokens * row_bytes <= TWO_SHOT_BYTES
    elif limits.one_shot_tokens > 1:
        assert limits.one_shot_tokens * row_bytes <= ONE_SHOT_BYTES_OF_TWO_RANKS
