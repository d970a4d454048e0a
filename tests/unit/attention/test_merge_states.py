"""Two states merged against one softmax over all keys, in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention.kernels.merge_states import AttentionState, merge_states


def state_of(scores: torch.Tensor, values: torch.Tensor) -> AttentionState:
    """scores (heads, n, m), values (m, d) -> the state of all m keys."""
    lse = scores.logsumexp(-1)
    return AttentionState((scores.softmax(-1) @ values).float(), lse.float())


def drawn(num_keys: int, seed: int, scale: float = 3.0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn((2, 5, num_keys), generator=generator, dtype=torch.float64) * scale
    return scores, torch.randn((num_keys, 8), generator=generator, dtype=torch.float64)


def no_keys() -> AttentionState:
    return AttentionState(torch.full((2, 5, 8), 7.0), torch.full((2, 5), -torch.inf))


@settings(max_examples=60, deadline=None)
@given(
    cuts=st.lists(st.integers(1, 20), min_size=1, max_size=5),
    seed=st.integers(0, 1000),
    offset=st.floats(-300.0, 300.0),
)
def test_any_cut_of_the_keys_merges_to_one_softmax(cuts, seed, offset):
    """offset: scores of hundreds overflow where an exponent is not taken relative to the peak."""
    scores, values = drawn(sum(cuts), seed)
    scores += offset
    parts = zip(scores.split(cuts, dim=-1), values.split(cuts), strict=True)
    first, *others = (state_of(*part) for part in parts)
    merged = first
    for other in others:
        merged = merge_states(merged, other)
    whole = state_of(scores, values)
    torch.testing.assert_close(merged.out, whole.out, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(merged.lse, whole.lse, rtol=1e-6, atol=1e-4)


def test_the_order_of_the_two_does_not_matter():
    one, other = state_of(*drawn(9, 1)), state_of(*drawn(4, 2, scale=30.0))
    ahead, back = merge_states(one, other), merge_states(other, one)
    torch.testing.assert_close(ahead.out, back.out, rtol=1e-6, atol=1e-6)
    assert torch.equal(ahead.lse, back.lse)


@pytest.mark.parametrize("is_first", [True, False])
def test_a_state_without_keys_changes_nothing(is_first):
    state = state_of(*drawn(9, 1))
    pair = (no_keys(), state) if is_first else (state, no_keys())
    merged = merge_states(*pair)
    assert torch.equal(merged.out, state.out)
    torch.testing.assert_close(merged.lse, state.lse)


def test_two_states_without_keys_give_zeros_and_no_nan():
    merged = merge_states(no_keys(), no_keys())
    assert torch.equal(merged.out, torch.zeros_like(merged.out))
    assert torch.equal(merged.lse, no_keys().lse)
