"""Matrices of many experts as a checkpoint stores them, packed for the turns of a kernel."""

from abc import abstractmethod

import torch
from torch import nn

from workers.layers.kept.fp8 import BLOCK
from workers.layers.kept.int4 import VALUES_PER_WORD, pair_shifts

TURN = 128
"""Columns of a turn of every stack's kernel."""
WORDS_PER_TURN = TURN // VALUES_PER_WORD
GROUP_SIZE = 32
GROUPS_PER_TURN = TURN // GROUP_SIZE
_BITS = 4
_SCALE_OFFSET = 126
_MAX_EXPONENT = 254 - _SCALE_OFFSET


class KeptStack(nn.Module):
    """Matrices (rows, columns), whose tensors are buffers."""

    num_matrices: int
    rows: int
    columns: int

    @property
    def num_turns(self) -> int:
        return -(-self.columns // TURN)

    @abstractmethod
    def dequantised(self) -> torch.Tensor:
        """(num_matrices, rows, columns) float32: what every product is held against."""


class Fp4Stack(KeptStack):
    """MXFP4. words: int32 (num_matrices, rows, 16 * turns): word w of a turn has a pair of each of
    its groups, columns 2 * w and 2 * w + 1 of group j in the bits from 4 * j on and from 4 * j + 16
    on; columns beyond the last are zeros. scales: int32
    (num_matrices, turns, rows), a byte a group of 32: the exponent field of 2**126 times the
    scale in bfloat16, and 0 beyond the last column."""

    def __init__(self, num_matrices: int, rows: int, columns: int, device: torch.device) -> None:
        super().__init__()
        self.num_matrices, self.rows, self.columns = num_matrices, rows, columns
        words = num_matrices, rows, self.num_turns * WORDS_PER_TURN
        self.words = nn.Buffer(torch.zeros(words, dtype=torch.int32, device=device))
        scales = num_matrices, self.num_turns, rows
        self.scales = nn.Buffer(torch.zeros(scales, dtype=torch.int32, device=device))

    def take(self, place: int, rows: slice, blocks: torch.Tensor, scales: torch.Tensor) -> bool:
        """blocks: uint8 (n, groups, 16), the low four bits first; scales: uint8 (n, groups), as
        checkpoints have them. Whether all scales are in range: at most 2."""
        nibbles = torch.stack([blocks & 0xF, blocks >> _BITS], dim=-1).flatten(1)
        missing = self.num_turns * TURN - self.columns
        nibbles = nn.functional.pad(nibbles, (0, missing)).int()
        by_turn = nibbles.view(len(nibbles), -1, GROUPS_PER_TURN, WORDS_PER_TURN, 2)
        words = (by_turn << pair_shifts(blocks.device)).sum((2, 4), dtype=torch.int32)
        self.words[place, rows] = words.flatten(1)
        fields = nn.functional.pad(scales.int() + _SCALE_OFFSET, (0, missing // GROUP_SIZE))
        bytes_of = fields.view(len(nibbles), -1, GROUPS_PER_TURN)
        joined = (bytes_of << _byte_shifts(blocks.device)).sum(2, dtype=torch.int32)
        self.scales[place, :, rows] = joined.t()
        return int(scales.max()) <= _MAX_EXPONENT

    def dequantised(self) -> torch.Tensor:
        device = self.words.device
        by_turn = self.words.view(self.num_matrices, self.rows, -1, 1, WORDS_PER_TURN, 1)
        codes = (by_turn >> pair_shifts(device) & 0xF).flatten(2)
        magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], device=device)
        values = torch.cat([magnitudes, -magnitudes])[codes.long()]
        fields = self.scales.transpose(1, 2).unsqueeze(3) >> _byte_shifts(device) & 0xFF
        exponents = fields.flatten(2).repeat_interleave(GROUP_SIZE, 2) - _SCALE_OFFSET - 127
        return torch.ldexp(values, exponents)[:, :, : self.columns]


class Fp8Stack(KeptStack):
    """E4M3 with a scale a block of 128 x 128, all of them whole. values: float8_e4m3fn
    (num_matrices, rows, columns). scales: float32 (num_matrices, rows / 128, columns / 128)."""

    def __init__(self, num_matrices: int, rows: int, columns: int, device: torch.device) -> None:
        super().__init__()
        self.num_matrices, self.rows, self.columns = num_matrices, rows, columns
        size = num_matrices, rows, columns
        self.values = nn.Buffer(torch.empty(size, dtype=torch.float8_e4m3fn, device=device))
        scales = num_matrices, rows // BLOCK, columns // BLOCK
        self.scales = nn.Buffer(torch.empty(scales, dtype=torch.float32, device=device))

    def take(self, place: int, first_row: int, values: torch.Tensor, scales: torch.Tensor) -> None:
        """values: (n, columns) from first_row on, scales: (n / 128, columns / 128)."""
        rows = slice(first_row, first_row + len(values))
        self.values[place, rows].copy_(values)
        self.scales[place, first_row // BLOCK : rows.stop // BLOCK].copy_(scales)

    def dequantised(self) -> torch.Tensor:
        spread = self.scales.repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)
        return self.values.float() * spread


def _byte_shifts(device: torch.device) -> torch.Tensor:
    """int32 (4,): of the groups' scales in a word."""
    return torch.arange(0, 32, 8, dtype=torch.int32, device=device)
