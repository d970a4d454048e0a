"""Sums over GPUs as a decode step needs them, with the residual addition and the norm after them.

    python3 -m benchmarks.h200.all_reduce --gpus 2 --hidden 4096 [--quick]

Times, in a graph of many calls, us a call: NCCL and torch's symmetric-memory operations, each with
the addition and norm as a kernel after it, and our one-shot and two-shot ways, one kernel each.
Before that the results of ours are checked, and NCCL's reported: see all_reduce_checks. A rank that
does not answer ends the others in --timeout-s.
"""

import argparse
import math
import os
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory as symmetric
from torch.multiprocessing.spawn import spawn

from benchmarks.h200.all_reduce_case import DTYPE, EPS, Case, Places, captured
from benchmarks.h200.all_reduce_checks import check_delays, check_sums, report_nccl
from workers.layers.cuda.norm import add_rms_norm_
from workers.parallel.group import connect_tp_group

_TOKENS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096, 8192)
_QUICK_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 2048, 8192)
_CHECKED_TOKENS = (1, 5, 128, 300, 2048)
_CALLS = 32
_REPEATS = 20
_MAX_TOKENS = 8192
_MAX_TORCH_ONE_SHOT_BYTES = 8 << 20
_MIN_TORCH_TWO_SHOT_BYTES = 1 << 16
_KILLED_S = 60.0

Call = Callable[[], object]


class Ways:
    """What is timed for one number of tokens: calls that take turns."""

    def __init__(self, case: Case, places: Places) -> None:
        self._case = case
        self._places = places

    def one_shot(self) -> list[Call]:
        case, residual = self._case, self._case.residual.clone()
        places = self._places.one_shot[1:]
        for place in places:
            case.write(place, 0)
        return [partial(place.add_norm_, residual, case.weight, EPS) for place in places]

    def two_shot(self) -> list[Call]:
        case, place = self._case, self._places.two_shot
        case.write(place, 0)
        return [partial(place.add_norm_, case.residual.clone(), case.weight, EPS)]

    def nccl(self) -> list[Call]:
        case = self._case
        residual, part = case.residual.clone(), case.parts[0].clone()

        def call() -> None:
            dist.all_reduce(part)
            add_rms_norm_(part.unsqueeze(0), residual, case.weight, EPS)

        return [call]

    def torch_one_shot(self) -> list[Call]:
        return self._torch_symmetric(torch.ops.symm_mem.one_shot_all_reduce)

    def torch_two_shot(self) -> list[Call]:
        return self._torch_symmetric(torch.ops.symm_mem.two_shot_all_reduce_)

    def _torch_symmetric(self, operation: Callable[..., torch.Tensor]) -> list[Call]:
        case, residual = self._case, self._case.residual.clone()
        part = symmetric.empty(case.size, dtype=DTYPE, device=residual.device)
        part.zero_()
        group = dist.group.WORLD
        if group is None:
            raise RuntimeError("no process group")
        name = group.group_name
        symmetric.rendezvous(part, name)

        def call() -> None:
            total = operation(part, "sum", name)
            add_rms_norm_(total.unsqueeze(0), residual, case.weight, EPS)

        return [call]


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
    places = Places.share(tp, _MAX_TOKENS, hidden, arguments.timeout_s)
    say = partial(print, flush=True) if rank == 0 else _say_nothing
    for num_tokens in _CHECKED_TOKENS:
        check_sums(Case(rank, num_tokens, hidden), places, tp)
    say(f"{arguments.gpus} ranks, hidden {hidden}: ours is right, one-shot and two-shot alike")
    check_delays(places, tp, hidden)
    say("and with late ranks")
    for line in report_nccl(tp, hidden):
        say(line)
    say("us a call:")
    say("| tokens | bytes | one-shot | two-shot | NCCL | torch one-shot | torch two-shot |")
    for num_tokens in _QUICK_TOKENS if arguments.quick else _TOKENS:
        case = Case(rank, num_tokens, hidden)
        num_bytes = case.residual.nbytes
        ways = Ways(case, places)
        has_one = not arguments.no_torch and num_bytes <= _MAX_TORCH_ONE_SHOT_BYTES
        has_two = arguments.torch_two_shot and num_bytes > _MIN_TORCH_TWO_SHOT_BYTES
        timed = [
            ways.one_shot,
            ways.two_shot,
            ways.nccl,
            ways.torch_one_shot if has_one else None,
            ways.torch_two_shot if has_two else None,
        ]
        times = [us_or_nothing(way) if way else math.nan for way in timed]
        cells = " | ".join("" if math.isnan(time) else f"{time:.1f}" for time in times)
        say(f"| {num_tokens} | {num_bytes} | {cells} |")
    torch.cuda.synchronize()
    tp.barrier()
    sys.stdout.flush()
    # A communicator waits for graphs that hold calls of it: leave without taking it down.
    os._exit(0)


def _say_nothing(line: str) -> None:
    """One rank speaks for all."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--quick", action="store_true", help="fewer sizes")
    parser.add_argument("--no-torch", action="store_true", help="do not time torch's one-shot")
    parser.add_argument("--torch-two-shot", action="store_true", help="time torch's two-shot too")
    parser.add_argument("--timeout-s", type=float, default=_KILLED_S)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        meeting_point = f"file://{Path(folder) / 'meet'}"
        ranks = (arguments, meeting_point)
        spawn(run_rank, ranks, nprocs=arguments.gpus)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
