"""Counter-based Gumbel noise: a pure function of (seed, position, token id), with no state.

Because nothing but these three enters, a request draws the same noise alone, in any batch, in any
row order, on every tensor-parallel rank, and over any subset of the vocabulary.
Knows no logits and no requests.

A row's 64-bit key is splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
generators", 2014) of the seed and the position, on the host. Its halves give the row's Weyl
sequence over token ids (offset and odd stride), which Wellons' 32-bit finaliser "lowbias32"
(github.com/skeeto/hash-prospector, public domain: 16 21f0aaad 15 735a2d97 15) scrambles on the
device in int32 arithmetic that wraps around.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

KeyArray = npt.NDArray[np.uint64]

_GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_SPLITMIX_MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)
_SPLITMIX_MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)
_FINALISER_MULTIPLIER_1 = 0x21F0AAAD
_FINALISER_MULTIPLIER_2 = 0x735A2D97
_LARGEST_BELOW_ONE = 1.0 - 2.0**-24


def splitmix64(values: KeyArray) -> KeyArray:
    """One output of splitmix64 from each state in values (uint64, any shape)."""
    mixed = values + _GOLDEN_GAMMA
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _SPLITMIX_MULTIPLIER_1
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _SPLITMIX_MULTIPLIER_2
    return mixed ^ (mixed >> np.uint64(31))


def mix_seeds(seeds: list[int]) -> KeyArray:
    """Seeds of any sign, taken modulo 2**64, to one uint64 each, ready for `row_keys`."""
    return splitmix64(np.array([seed % 2**64 for seed in seeds], dtype=np.uint64))


def row_keys(mixed_seeds: KeyArray, positions: npt.NDArray[np.integer]) -> npt.NDArray[np.int32]:
    """Keys of the rows of one step: int32 (n, 2) from `mix_seeds` (n,) and positions (n,)."""
    keys = splitmix64(mixed_seeds + positions.astype(np.uint64))
    return keys.view(np.int32).reshape(-1, 2)


def negative_gumbel(token_ids: Tensor, keys: Tensor) -> Tensor:
    """Minus one standard Gumbel variate per (row, token), float32.

    token_ids: int32, (n, k) or broadcastable to it as (1, k) or (k,). keys: int32 (n, 2) of
    `row_keys`. The variate is log(E) with E = -log1p(-u) exponential: 31-bit u keeps its full
    relative precision near 0, where the winners of an argmax lie. All values are finite, in
    [-22.3, 2.9].
    """
    bits = token_ids * (keys[:, 1:2] | 1)
    bits += keys[:, 0:1]
    _xor_shift_right_(bits, 16).mul_(_FINALISER_MULTIPLIER_1)
    _xor_shift_right_(bits, 15).mul_(_FINALISER_MULTIPLIER_2)
    _xor_shift_right_(bits, 15).bitwise_and_(0x7FFFFFFF)
    negative_uniform = bits.to(torch.float32).add_(0.5).mul_(-(2.0**-31))
    # A u that rounds to 1 would make E infinite and the token impossible.
    return negative_uniform.clamp_(min=-_LARGEST_BELOW_ONE).log1p_().neg_().log_()


def _xor_shift_right_(bits: Tensor, shift: int) -> Tensor:
    """bits ^= bits >>> shift in place; the mask turns the arithmetic shift into a logical one."""
    shifted = (bits >> shift).bitwise_and_((1 << (32 - shift)) - 1)
    return bits.bitwise_xor_(shifted)
