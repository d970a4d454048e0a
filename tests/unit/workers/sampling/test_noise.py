"""Noise is a pure function of (seed, position, token id), and it is Gumbel."""

import math

import numpy as np
import torch

from workers.sampling.noise import mix_seeds, negative_gumbel, row_keys, splitmix64

MASK_32 = 2**32 - 1


def _keys(seeds, positions):
    return torch.from_numpy(row_keys(mix_seeds(seeds), np.array(positions, dtype=np.int32)))


def _reference_bits(token_id: int, offset: int, stride: int) -> int:
    """The documented hash in unbounded Python integers."""
    bits = (token_id * (stride | 1) + offset) & MASK_32
    bits = ((bits ^ (bits >> 16)) * 0x21F0AAAD) & MASK_32
    bits = ((bits ^ (bits >> 15)) * 0x735A2D97) & MASK_32
    return (bits ^ (bits >> 15)) & 0x7FFFFFFF


def test_splitmix64_gives_the_published_sequence_of_state_1234567() -> None:
    gamma = 0x9E3779B97F4A7C15
    states = np.array([(1234567 + i * gamma) % 2**64 for i in range(3)], dtype=np.uint64)
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert splitmix64(states).tolist() == published


def test_noise_equals_the_hash_in_unbounded_integers() -> None:
    keys = _keys([0, -1, 2**63 - 1], [0, 17, 131071])
    token_ids = [0, 1, 2, 77, 4095, 128255, 2**24 - 1]
    noise = negative_gumbel(torch.tensor(token_ids, dtype=torch.int32), keys)
    for row, (offset, stride) in enumerate((keys.long() & MASK_32).tolist()):
        for column, token_id in enumerate(token_ids):
            uniform = (_reference_bits(token_id, offset, stride) + 0.5) / 2**31
            expected = math.log(-math.log1p(-min(uniform, 1 - 2**-24)))
            assert abs(noise[row, column].item() - expected) < 1e-4


def test_noise_of_a_subset_of_tokens_is_that_of_the_whole_vocabulary() -> None:
    keys = _keys([1, 2, 3], [9, 9, 9])
    whole = negative_gumbel(torch.arange(1000, dtype=torch.int32), keys)
    subset = torch.tensor([[3, 999, 17], [0, 5, 5], [500, 1, 2]], dtype=torch.int32)
    assert torch.equal(negative_gumbel(subset, keys), whole.gather(1, subset.long()))


def test_noise_is_finite_at_both_ends_of_the_hash() -> None:
    # With offset and stride chosen so that ids walk through the whole range of the hash.
    keys = torch.tensor([[0, 65537]], dtype=torch.int32)
    noise = negative_gumbel(torch.arange(2**20, dtype=torch.int32), keys)
    assert noise.isfinite().all()
    assert noise.min() > -22.3
    assert noise.max() < 2.9


def test_noise_has_the_moments_of_a_gumbel_variate() -> None:
    keys = _keys(list(range(64)), [5] * 64)
    gumbel = -negative_gumbel(torch.arange(8192, dtype=torch.int32), keys).double()
    num_draws = gumbel.numel()
    standard_error = math.pi / math.sqrt(6 * num_draws)
    assert abs(gumbel.mean().item() - 0.5772156649) < 4 * standard_error
    assert abs(gumbel.var().item() - math.pi**2 / 6) < 0.02


def test_neighbouring_seeds_positions_and_tokens_are_uncorrelated() -> None:
    seeds = [seed for seed in range(33) for _ in range(33)]
    positions = list(range(33)) * 33
    noise = negative_gumbel(torch.arange(257, dtype=torch.int32), _keys(seeds, positions))
    uniform = (-noise.double().exp()).exp().view(33, 33, 257) - 0.5
    here = uniform[:-1, :-1, :-1]
    neighbours = {
        "seed": uniform[1:, :-1, :-1],
        "position": uniform[:-1, 1:, :-1],
        "token": uniform[:-1, :-1, 1:],
        "seed and position": uniform[1:, 1:, :-1],
    }
    limit = 4 / math.sqrt(here.numel())
    for name, there in neighbours.items():
        assert abs((here * there).mean().item() * 12) < limit, name


def test_every_seed_and_position_has_its_own_key() -> None:
    seeds = [seed for seed in range(-300, 300) for _ in range(200)]
    keys = _keys(seeds, list(range(200)) * 600)
    assert len({tuple(key) for key in keys.tolist()}) == len(seeds)
