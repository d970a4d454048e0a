"""The projections of a layer with adapters, each with the kernel that reads what it leaves.

Llama-3.1-8B's shapes on one GPU, random numbers: what adapter_products.py times.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from attention.qkv_projection import Rotation
from benchmarks.h200.attention_steps import graphed_seconds
from workers.adapters.adapted_products import AddAdapters, StepGroups
from workers.layers.cuda.activation import gate_and_mul
from workers.layers.cuda.adapter_products import AdapterMatrices, AdapterTiles, OutputBlocks
from workers.layers.cuda.norm import add_rms_norm_
from workers.layers.cuda.rope import FusedRope, RopeShape
from workers.layers.gemm.choice import GemmChooser
from workers.layers.gemm.matrix import gated_gemms, partial_gemms

CUDA = torch.device("cuda", 0)
HIDDEN, WIDTH, KV, HEAD = 4096, 14336, 1024, 128
PROJECTIONS = {
    "qkv": (HIDDEN, (HIDDEN, KV, KV)),
    "o": (HIDDEN, (HIDDEN,)),
    "gate_up": (HIDDEN, (WIDTH, WIDTH)),
    "down": (WIDTH, (HIDDEN,)),
}
"""(inputs, outputs of each part), on one rank."""
REPEATS = 20
NUM_COPIES = 32
"""Of every matrix, by turns as layers have their own: they do not stay in the L2 cache."""
BYTES_PER_S = 4.8e12
"""Of an H200, as NVIDIA gives it."""

Run = Callable[[torch.Tensor], object]


@dataclass(frozen=True, slots=True)
class Adapters:
    """How many tokens, adapters and ranks a case has."""

    num_tokens: int
    num_adapters: int
    rank: int


def readers(num_tokens: int) -> dict[str, Run]:
    """By projection, what takes its partial products (splits, num_tokens, outputs) in a step."""
    bfloat16 = partial(torch.zeros, dtype=torch.bfloat16, device=CUDA)
    residual, scale = bfloat16(num_tokens, HIDDEN), bfloat16(HIDDEN)
    k, v = bfloat16(num_tokens, KV), bfloat16(num_tokens, KV)
    positions = torch.arange(num_tokens, device=CUDA)
    rotation = Rotation(torch.zeros(num_tokens, HEAD, device=CUDA), None, None)
    rope = FusedRope(RopeShape(HIDDEN // HEAD, KV // HEAD, HEAD), rotation)

    def join(parts: torch.Tensor) -> torch.Tensor:
        return add_rms_norm_(parts, residual, scale, 1e-5)

    return {
        "qkv": lambda parts: rope(parts, positions, positions, k, v, torch.bfloat16),
        "o": join,
        "gate_up": lambda parts: gate_and_mul(parts, torch.bfloat16, "silu"),
        "down": join,
    }


def matrices(
    inputs: int, outputs: tuple[int, ...], case: Adapters
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """a, b and ranks as AdapterMatrices has them."""
    num_slots, rank = case.num_adapters + 1, case.rank
    a = torch.randn(num_slots, len(outputs) * rank, inputs, device=CUDA).bfloat16()
    b = torch.randn(num_slots, sum(outputs), rank, device=CUDA).bfloat16()
    ranks = torch.full((num_slots, len(outputs)), rank, dtype=torch.int32, device=CUDA)
    ranks[0] = 0
    return a, b, ranks


def parts_of(outputs: tuple[int, ...]) -> list[slice]:
    stops = [sum(outputs[: index + 1]) for index in range(len(outputs))]
    return [slice(stop - size, stop) for stop, size in zip(stops, outputs, strict=True)]


class Case:
    """One projection of all layers, with inputs and with what reads its products."""

    def __init__(self, name: str, read: Run, adapters: Adapters) -> None:
        inputs, outputs = PROJECTIONS[name]
        self._read, self._parts = read, parts_of(outputs)
        self._matrices = [matrices(inputs, outputs, adapters) for _ in range(NUM_COPIES)]
        weights = [
            torch.randn(sum(outputs), inputs, device=CUDA).bfloat16() for _ in range(NUM_COPIES)
        ]
        chooser = GemmChooser.for_device(CUDA)
        self._gemms = partial_gemms(chooser, weights, True)
        # Without adapters a gate's product is one with its activation.
        self._gated = gated_gemms(chooser, weights, "silu") if name == "gate_up" else None
        self._x = torch.randn(adapters.num_tokens, inputs, device=CUDA).bfloat16()
        a, b, _ = self._matrices[0]
        self.floor_s = (a[1:].numel() + b[1:].numel()) * 2 / BYTES_PER_S

    def plain_seconds(self) -> float:
        """Of one layer without adapters, as the model itself runs it."""
        if self._gated is not None:
            return self._seconds_a_layer(self._gated)
        return self._seconds_a_layer([self._read_after(gemm) for gemm in self._gemms])

    def seconds(self, tiles: AdapterTiles, add: AddAdapters, step: StepGroups) -> float:
        """Of one layer. Raises OutOfResources where the tiles do not fit."""
        blocks = OutputBlocks.of(self._parts, CUDA, tiles)
        layers = [AdapterMatrices(*one, blocks, tiles) for one in self._matrices]
        return self._seconds_a_layer(
            [
                self._read_after(add(gemm, layer, step))
                for gemm, layer in zip(self._gemms, layers, strict=True)
            ]
        )

    def _read_after(self, product: Callable[[torch.Tensor], torch.Tensor]) -> Run:
        return lambda x: self._read(product(x))

    def _seconds_a_layer(self, products: Sequence[Run]) -> float:
        def run() -> None:
            for one in products:
                one(self._x)

        return graphed_seconds(run, REPEATS) / NUM_COPIES
