"""Sums over GPUs as a decode step needs them, with the residual addition and the norm after them.

    python3 -m benchmarks.h200.all_reduce --gpus 2 --hidden 4096 [--quick]

Times, in a graph of many calls, us a call: NCCL and torch's symmetric-memory operations, each with
the addition and norm as a kernel after it, and ours, where it is one kernel. Before that the
results of ours are compared with a float64 sum and between the ranks, bit for bit, eagerly and from
a graph. A rank that does not answer ends the others in --timeout-s.
"""

import argparse
import math
import os
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory as symmetric
from torch.multiprocessing.spawn import spawn

from workers.layers.cuda.norm import add_rms_norm_
from workers.layers.cuda.peer_norm import PeerNorm
from workers.parallel.group import TorchDistributedGroup, connect_tp_group
from workers.parallel.peer_memory import PeerArena

_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 2048, 8192)
_QUICK_TOKENS = (1, 8, 64, 256, 2048, 8192)
_CALLS = 32
_REPEATS = 20
_MAX_TOKENS = 8192
_MAX_ONE_SHOT_BYTES = 8 << 20
_EPS = 1e-5
_DTYPE = torch.bfloat16
_MAX_ERROR = 1e-2
_KILLED_S = 60.0

Call = Callable[[], object]
Result = TypeVar("Result")


class Case:
    """One number of tokens on one rank. ours: two places that take turns."""

    def __init__(
        self, tp: TorchDistributedGroup, ours: list[PeerNorm], num_tokens: int, hidden: int
    ) -> None:
        device = torch.device("cuda", tp.rank)
        self._tp = tp
        self._ours = ours
        self.size = (num_tokens, hidden)
        generator = torch.Generator(device).manual_seed(tp.rank)
        self.part = torch.randn(self.size, dtype=_DTYPE, device=device, generator=generator)
        generator.manual_seed(1000)
        self.residual = torch.randn(self.size, dtype=_DTYPE, device=device, generator=generator)
        self.weight = torch.rand(hidden, dtype=_DTYPE, device=device, generator=generator)

    def fill_ours(self) -> None:
        for place in self._ours:
            place.new(self.size, dtype=_DTYPE, device=self.part.device).copy_(self.part)

    def reference(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The new residual and its norm in float64."""
        total = self.part.double()
        dist.all_reduce(total)
        stream = (self.residual.double() + total).to(_DTYPE).double()
        scale = torch.rsqrt(stream.pow(2).mean(-1, keepdim=True) + _EPS)
        return stream, stream * scale * self.weight.double()

    def ours(self) -> list[Call]:
        residual = self.residual.clone()
        return [partial(place.add_norm_, residual, self.weight, _EPS) for place in self._ours]

    def nccl(self) -> list[Call]:
        residual, part = self.residual.clone(), self.part.clone()

        def call() -> None:
            dist.all_reduce(part)
            add_rms_norm_(part.unsqueeze(0), residual, self.weight, _EPS)

        return [call]

    def torch_one_shot(self) -> list[Call]:
        return self._torch_symmetric(torch.ops.symm_mem.one_shot_all_reduce)

    def torch_two_shot(self) -> list[Call]:
        return self._torch_symmetric(torch.ops.symm_mem.two_shot_all_reduce_)

    def _torch_symmetric(self, operation: Callable[..., torch.Tensor]) -> list[Call]:
        residual = self.residual.clone()
        part = symmetric.empty(self.size, dtype=_DTYPE, device=self.part.device)
        part.zero_()
        group = dist.group.WORLD
        if group is None:
            raise RuntimeError("no process group")
        name = group.group_name
        symmetric.rendezvous(part, name)

        def call() -> None:
            total = operation(part, "sum", name)
            add_rms_norm_(total.unsqueeze(0), residual, self.weight, _EPS)

        return [call]


def check(case: Case, tp: TorchDistributedGroup, place: PeerNorm, other: PeerNorm) -> None:
    """Raises RuntimeError where ours is wrong or differs between ranks, eagerly or in a graph."""
    want_stream, want = case.reference()

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        residual = case.residual.clone()
        hidden = place.add_norm_(residual, case.weight, _EPS)
        unused = case.residual.clone()
        other.add_norm_(unused, case.weight, _EPS)
        return residual, hidden

    def run_begin() -> tuple[torch.Tensor, torch.Tensor]:
        residual = torch.empty_like(case.residual)
        place.begin_stream(residual, case.weight, _EPS)
        place.begin_stream(residual, case.weight, _EPS)
        return residual, residual

    case.fill_ours()
    graph, (stream, hidden) = captured(run)
    graph.replay()
    graph.replay()
    for name, got in (("eager", run()), ("graph", (stream, hidden))):
        for what, ours, expected in zip(("stream", "norm"), got, (want_stream, want), strict=True):
            compare(f"{name} {what} {tuple(case.size)}", ours, expected, tp)
    begun, _ = run_begin()
    compare(f"begun {tuple(case.size)}", begun, want_stream - case.residual.double(), tp)


def compare(name: str, ours: torch.Tensor, want: torch.Tensor, tp: TorchDistributedGroup) -> None:
    error = float((ours.double() - want).norm() / want.norm())
    of_rank_0 = ours.clone()
    dist.broadcast(of_rank_0, 0)
    if not error < _MAX_ERROR or not torch.equal(of_rank_0, ours):
        is_equal = torch.equal(of_rank_0, ours)
        raise RuntimeError(
            f"rank {tp.rank}: {name}: error {error:.2e}, equal to rank 0: {is_equal}"
        )


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


def us_a_call(calls: list[Call]) -> float:
    """The median replay of a graph of many calls, by turns."""

    def run() -> None:
        for index in range(_CALLS):
            calls[index % len(calls)]()

    graph, _ = captured(run)
    graph.replay()
    times: list[float] = []
    for _ in range(_REPEATS):
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / _CALLS)
    return sorted(times)[len(times) // 2]


def us_or_nothing(way: Callable[[], list[Call]]) -> float:
    """Not a number where an operation refuses the size: the others are still of interest."""
    try:
        return us_a_call(way())
    except RuntimeError as error:
        print(f"{way.__name__}: {error}", file=sys.stderr, flush=True)
        return math.nan


def run_rank(rank: int, arguments: argparse.Namespace, meeting_point: str) -> None:
    device = torch.device("cuda", rank)
    tp = connect_tp_group("nccl", meeting_point, rank, arguments.gpus, device, arguments.timeout_s)
    hidden = arguments.hidden
    memory = tp.share_memory(2 * PeerNorm.num_bytes(_MAX_TOKENS, hidden, _DTYPE))
    if memory is None:
        raise RuntimeError("no peer memory: see the warning above")
    arena = PeerArena(memory)
    timeout_ns = int(arguments.timeout_s * 1e9)
    ours = [PeerNorm(arena, _MAX_TOKENS, hidden, _DTYPE, timeout_ns) for _ in range(2)]
    tokens = _QUICK_TOKENS if arguments.quick else _TOKENS
    for num_tokens in (1, 5, 300, 2048):
        check(Case(tp, ours, num_tokens, hidden), tp, *ours)
    if rank == 0:
        print(f"{arguments.gpus} ranks, hidden {hidden}: ours is right, us a call:", flush=True)
        print("| tokens | bytes | ours | NCCL | torch one-shot | torch two-shot |", flush=True)
    for num_tokens in tokens:
        case = Case(tp, ours, num_tokens, hidden)
        num_bytes = num_tokens * hidden * _DTYPE.itemsize
        takes_one_shot = num_bytes <= _MAX_ONE_SHOT_BYTES
        takes_two_shot = num_bytes > 1 << 16 and arguments.torch_two_shot
        ways = [
            case.ours,
            case.nccl,
            case.torch_one_shot if takes_one_shot else None,
            case.torch_two_shot if takes_two_shot else None,
        ]
        times = [us_or_nothing(way) if way else math.nan for way in ways]
        if rank == 0:
            cells = " | ".join(f"{time:.1f}" for time in times)
            print(f"| {num_tokens} | {num_bytes} | {cells} |", flush=True)
    torch.cuda.synchronize()
    tp.barrier()
    sys.stdout.flush()
    # A communicator waits for graphs that hold calls of it: leave without taking it down.
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--quick", action="store_true", help="fewer sizes")
    parser.add_argument("--torch-two-shot", action="store_true", help="time it too")
    parser.add_argument("--timeout-s", type=float, default=_KILLED_S)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        meeting_point = f"file://{Path(folder) / 'meet'}"
        ranks = (arguments, meeting_point)
        spawn(run_rank, ranks, nprocs=arguments.gpus)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
