"""Inputs, ways and graphs that the checks and the timing of sums over GPUs have in common."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from workers.layers.cuda.peer_norm import PeerNorm
from workers.layers.cuda.two_shot_norm import TwoShotNorm
from workers.parallel.group import TorchDistributedGroup
from workers.parallel.peer_memory import PeerArena

EPS = 1e-5
DTYPE = torch.bfloat16
JOINS = 2
"""Of a layer."""

Result = TypeVar("Result")
PassResult = tuple[torch.Tensor, ...]
"""The norm of the stream's beginning, the norm after each join, selected rows of the stream."""


@dataclass(frozen=True, slots=True)
class Places:
    """one_shot: as a model has them, for the stream's beginning and for each of a layer's joins."""

    one_shot: tuple[PeerNorm, ...]
    two_shot: TwoShotNorm

    @classmethod
    def share(
        cls, tp: TorchDistributedGroup, max_tokens: int, hidden_size: int, timeout_s: float
    ) -> "Places":
        num_bytes = (1 + JOINS) * PeerNorm.num_bytes(max_tokens, hidden_size, DTYPE)
        num_bytes += TwoShotNorm.num_bytes(max_tokens, hidden_size, DTYPE)
        memory = tp.share_memory(num_bytes)
        if memory is None:
            raise RuntimeError("no peer memory: see the warning above")
        arena, timeout_ns = PeerArena(memory), int(timeout_s * 1e9)
        sizes = max_tokens, hidden_size, DTYPE, timeout_ns
        return cls(
            tuple(PeerNorm(arena, *sizes) for _ in range(1 + JOINS)), TwoShotNorm(arena, *sizes)
        )


class Case:
    """One number of tokens on one rank. parts: what this rank brings to the beginning and to each
    join; rows: those that are selected at the end, the same on all ranks."""

    def __init__(self, rank: int, num_tokens: int, hidden_size: int, seed: int = 0) -> None:
        device = torch.device("cuda", rank)
        self.size = (num_tokens, hidden_size)
        generator = torch.Generator(device).manual_seed(100 * seed + rank)
        self.parts = tuple(
            torch.randn(self.size, dtype=DTYPE, device=device, generator=generator)
            for _ in range(1 + JOINS)
        )
        generator.manual_seed(100_000 + seed)
        self.residual = torch.randn(self.size, dtype=DTYPE, device=device, generator=generator)
        self.weight = torch.rand(hidden_size, dtype=DTYPE, device=device, generator=generator)
        self.rows = torch.randint(num_tokens, (7,), device=device, generator=generator)

    @property
    def num_tokens(self) -> int:
        return self.size[0]

    def write(self, place: PeerNorm | TwoShotNorm, index: int) -> None:
        """As a GEMM leaves its product."""
        part = self.parts[index]
        place.new(self.size, dtype=DTYPE, device=part.device).copy_(part)

    def one_shot_pass(self, places: Places, pause: Callable[[], None]) -> PassResult:
        """A step of one layer. pause: called wherever a rank may be late."""
        first, *others = places.one_shot
        pause()
        self.write(first, 0)
        pause()
        residual, norm = first.begin_stream(self.num_tokens, self.weight, EPS)
        norms = [norm]
        for index, place in enumerate(others, start=1):
            pause()
            self.write(place, index)
            pause()
            norms.append(place.add_norm_(residual, self.weight, EPS))
        pause()
        return *norms, residual.index_select(0, self.rows)

    def two_shot_pass(self, places: Places, pause: Callable[[], None]) -> PassResult:
        """The same, rows being shared by the ranks."""
        place = places.two_shot
        pause()
        self.write(place, 0)
        pause()
        residual, norm = place.begin_stream(self.num_tokens, self.weight, EPS)
        norms = [norm.clone()]
        for index in range(1, 1 + JOINS):
            pause()
            self.write(place, index)
            pause()
            norm = place.add_norm_(residual, self.weight, EPS)
            pause()
            # Late, as a GEMM that still reads it.
            norms.append(norm.clone())
        pause()
        return *norms, place.read_rows(self.rows, self.num_tokens)


def captured(run: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result]:
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        run()
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            out = run()
        finally:
            graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    return graph, out
