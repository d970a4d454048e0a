"""Chosen experts in grouped products, with what the tokens' adapters add to each expert's own.

Two launches before the first product and two behind the second, however many adapters and experts
a step has (expert_adapter_kernels.py), all over the blocks that the products have. Nothing waits
for the device and no size depends on what is in it: a captured step replays with other adapters.
Needs Triton. Proved by its interpreter and by compiling for sm90; it has run on no GPU.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton

from workers.layers.cuda.expert_adapter_kernels import (
    expand_down_kernel,
    expand_gate_up_kernel,
    shrink_kernel,
)
from workers.layers.cuda.expert_gemm import AddedRows, activate_by_pointers
from workers.layers.cuda.expert_routing import Chosen, ExpertBlocks, group, pairs_here
from workers.layers.cuda.expert_tiles import BY_POINTERS, Tiles, tiles_for
from workers.layers.cuda.launch import dependent_launch, next_power_of_2
from workers.layers.gemm.device_limits import DeviceLimits
from workers.layers.routed_experts import RoutedWeights

_MIN_DOT = 16
"""Of each side of what tensor cores multiply."""

_GATE_UP, _DOWN = 0, 2
"""The columns of ranks at which the parts of each matrix begin."""


@dataclass(frozen=True, slots=True)
class ExpertAdapterMatrices:
    """Of one layer's num_kept experts on this rank, in the model's dtype, contiguous.

    gate_up_a (num_slots + 1, num_kept, 2 * max_rank, hidden_size), gate's ranks over up's, and
    gate_up_b (num_slots + 1, num_kept, 2 * width, max_rank), gate's rows over up's; down_a
    (num_slots + 1, num_kept, max_rank, width) and down_b (num_slots + 1, num_kept, hidden_size,
    max_rank): zeros beyond an expert's own rank. ranks: int32 (num_slots + 1, 3), the highest of
    any expert for gate, up and down, 0 where an adapter has nothing. Of slot 0 nothing is read.
    """

    gate_up_a: torch.Tensor
    gate_up_b: torch.Tensor
    down_a: torch.Tensor
    down_b: torch.Tensor
    ranks: torch.Tensor

    @property
    def max_rank(self) -> int:
        return self.down_a.shape[2]


@dataclass(frozen=True, slots=True)
class ExpertAdapterTiles:
    """What a program has at once of ranks, of a shrink's inputs and of an expand's outputs; as many
    as num_splits share a shrink's inputs, each of min_turns times inputs at least. Not measured."""

    ranks: int
    inputs: int
    outputs: int
    num_splits: int
    num_warps: int
    num_stages: int = 3
    min_turns: int = 4

    @classmethod
    def of(cls, block_rows: int) -> "ExpertAdapterTiles":
        """Few rows wait for memory and have programs to spare, many are short of registers."""
        if block_rows <= 32:
            return cls(32, 128, 128, num_splits=64 // block_rows, num_warps=4)
        return cls(64, 64, 128, num_splits=1, num_warps=4 if block_rows <= 64 else 8)

    def rank_block(self, max_rank: int) -> int:
        return min(self.ranks, max(_MIN_DOT, next_power_of_2(max_rank)))

    def splits_of(self, num_inputs: int) -> int:
        return min(self.num_splits, -(-num_inputs // (self.min_turns * self.inputs)))

    def inputs_of_split(self, num_inputs: int) -> int:
        """Whole turns, the same for all splits; the last ones may have fewer."""
        num_turns = -(-num_inputs // self.inputs)
        return -(-num_turns // self.splits_of(num_inputs)) * self.inputs


def adapted_partial_products(
    hidden: torch.Tensor,
    chosen: Chosen,
    experts: RoutedWeights,
    matrices: ExpertAdapterMatrices,
    slot_of_token: torch.Tensor,
    num_parts: int = 1,
) -> torch.Tensor:
    """routed_experts.partial_products, by pointers, of tokens that have adapters: hidden (n,
    hidden_size), contiguous -> (k, n, hidden_size). slot_of_token: int32 (n,), 0 for none: those
    tokens' are the same bits that the products without adapters have, with the same tiles."""
    activate, project = _tiles(pairs_here(chosen, num_parts), experts)
    grouped = group(chosen, activate.block_rows, int(num_parts > 1))
    adapters = _BlockAdapters(matrices, slot_of_token, grouped, chosen.weights)
    activated = activate_by_pointers(
        activate,
        hidden,
        experts.gate_up,
        grouped,
        chosen.ids.shape[1],
        experts.gate_up_bias,
        experts.gating,
        AddedRows(adapters.gate_up(hidden), slot_of_token),
    )
    out = project.project(
        activated, experts.down, chosen.weights, grouped, experts.down_bias, num_parts > 1
    )
    adapters.add_down(out, activated)
    return out


def _tiles(num_pairs: int, experts: RoutedWeights) -> Tiles:
    shared_bytes = DeviceLimits.of(experts.down.device).shared_bytes
    return tiles_for(BY_POINTERS, num_pairs, experts.down.shape[0], shared_bytes)


@dataclass(frozen=True, slots=True)
class _BlockAdapters:
    """Of one pass through a layer. weights: float32 (n, k), of the choices."""

    matrices: ExpertAdapterMatrices
    slot_of_token: torch.Tensor
    grouped: ExpertBlocks
    weights: torch.Tensor

    def gate_up(self, x: torch.Tensor) -> torch.Tensor:
        """x (n, hidden_size) -> (n * k, 2 * width) as AddedRows has them."""
        shrunk = self._shrink(x, self.matrices.gate_up_a, _GATE_UP)
        _, _, num_outputs, _ = self.matrices.gate_up_b.shape
        num_pairs, width = self.weights.numel(), num_outputs // 2
        added = torch.empty((num_pairs, num_outputs), dtype=x.dtype, device=x.device)
        num_tiles = 2 * triton.cdiv(width, self._tiles.outputs)
        expand_gate_up_kernel[(self.grouped.max_blocks * num_tiles,)](
            shrunk,
            self.matrices.gate_up_b,
            added,
            *self._blocks(),
            num_pairs,
            WIDTH=width,
            **self._expand_options(shrunk),
        )
        return added

    def add_down(self, out: torch.Tensor, activated: torch.Tensor) -> None:
        """out (k, n, hidden_size), contiguous, += what adapters make of activated (n * k, width),
        in the order of pairs, times the weights."""
        shrunk = self._shrink(activated, self.matrices.down_a, _DOWN)
        num_tokens, width = out.shape[1:]
        num_tiles = triton.cdiv(width, self._tiles.outputs)
        expand_down_kernel[(self.grouped.max_blocks * num_tiles,)](
            shrunk,
            self.matrices.down_b,
            out,
            self.weights,
            *self._blocks(),
            num_tokens,
            WIDTH=width,
            **self._expand_options(shrunk),
        )

    @property
    def _tiles(self) -> ExpertAdapterTiles:
        return ExpertAdapterTiles.of(self.grouped.block_rows)

    def _blocks(self) -> tuple[Any, ...]:
        """What all three kernels take in this order."""
        grouped = self.grouped
        places = grouped.pairs, grouped.blocks, grouped.num_blocks, grouped.max_blocks
        return self.slot_of_token, self.matrices.ranks, *places

    def _shrink(self, x: torch.Tensor, a: torch.Tensor, first_part: int) -> torch.Tensor:
        """x of tokens for gate and up, of pairs in their order for down -> float32 (num_splits,
        n * k, parts * max_rank), of which only what rows' adapters have is ever written or read."""
        tiles, max_rank, num_pairs = self._tiles, self.matrices.max_rank, self.weights.numel()
        _, _, num_ranks, num_inputs = a.shape
        num_parts, num_splits = num_ranks // max_rank, tiles.splits_of(num_inputs)
        size = num_splits, num_pairs, num_ranks
        shrunk = torch.empty(size, dtype=torch.float32, device=x.device)
        num_tiles = num_parts * triton.cdiv(max_rank, tiles.rank_block(max_rank))
        shrink_kernel[(self.grouped.max_blocks * num_tiles, num_splits)](
            x,
            a,
            shrunk,
            *self._blocks(),
            num_pairs,
            DEPTH_SIZE=num_inputs,
            FIRST_PART=first_part,
            NUM_PARTS=num_parts,
            IS_BY_TOKEN=first_part == _GATE_UP,
            OF_SPLIT=tiles.inputs_of_split(num_inputs),
            DEPTH=tiles.inputs,
            num_stages=tiles.num_stages,
            **self._options(shrunk),
        )
        return shrunk

    def _expand_options(self, shrunk: torch.Tensor) -> dict[str, Any]:
        options = {"NUM_SPLITS": shrunk.shape[0], "OUTPUTS": self._tiles.outputs}
        # Of one or two turns.
        return {**options, "num_stages": 1, **self._options(shrunk)}

    def _options(self, tensor: torch.Tensor) -> dict[str, Any]:
        """What all three kernels take by name."""
        tiles, max_rank, is_dependent = (
            self._tiles,
            self.matrices.max_rank,
            dependent_launch(tensor),
        )
        return {
            "NUM_EXPERTS": self.matrices.down_a.shape[1],
            "MAX_RANK": max_rank,
            "NUM_CHOSEN": self.weights.shape[1],
            "ROWS": self.grouped.block_rows,
            "RANKS": tiles.rank_block(max_rank),
            "IS_DEPENDENT": is_dependent,
            "num_warps": tiles.num_warps,
            "launch_pdl": is_dependent,
        }
