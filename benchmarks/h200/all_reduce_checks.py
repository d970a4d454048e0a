"""Whether sums over GPUs are right, before they are timed.

Over peer memory: against float64, between the ranks and between one-shot and two-shot bit for bit,
eagerly and from graphs, and with ranks that are late at random. Over NCCL: what eager steps and
graphs give is only reported.
"""

import random
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from benchmarks.h200.all_reduce_case import EPS, Case, PassResult, Places, captured
from workers.layers.cuda.norm import add_rms_norm_, rms_norm
from workers.parallel.group import TorchDistributedGroup

_MAX_ERROR = 1e-2
_MAX_NCCL_ERROR = 5e-2
_DELAYED_TOKENS = (3, 64, 301)
_DELAYED_SEEDS = (1, 2)
_DELAYED_PASSES = 300
_IS_LATE = 0.25
_MAX_SLEEP_CYCLES = 150_000
_NCCL_TOKENS = (8, 256)
_NCCL_JOINS = 4
_NCCL_REPLAYS = 3

Pass = Callable[[Places, Callable[[], None]], PassResult]


def on_time() -> None:
    """No pause."""


def check_sums(case: Case, places: Places, tp: TorchDistributedGroup) -> None:
    """Raises RuntimeError where a way over peer memory is wrong."""
    want = _reference(case)
    eager = case.one_shot_pass(places, on_time)
    runs = {"one-shot": eager, "two-shot": case.two_shot_pass(places, on_time)}
    graphs = []
    for name, one in (("one-shot", case.one_shot_pass), ("two-shot", case.two_shot_pass)):
        graph, out = captured(partial(one, places, on_time))
        graphs.append(graph)
        graph.replay()
        graph.replay()
        runs[f"{name} in a graph"] = out
    for name, found in runs.items():
        for index, (ours, expected) in enumerate(zip(found, want, strict=True)):
            what = f"{name}, {case.num_tokens} tokens, result {index}"
            _compare(what, ours, expected, eager[index], tp)


def _reference(case: Case) -> PassResult:
    """In float64, the stream rounded where it is kept."""
    stream = torch.zeros(case.size, dtype=torch.float64, device=case.residual.device)
    norms = []
    for part in case.parts:
        total = part.double()
        dist.all_reduce(total)
        stream = (stream + total).to(part.dtype).double()
        norms.append(_plain_norm(stream, case.weight.double()))
    return *norms, stream.index_select(0, case.rows)


def _plain_norm(stream: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return stream * torch.rsqrt(stream.pow(2).mean(-1, keepdim=True) + EPS) * weight


def _error(ours: torch.Tensor, want: torch.Tensor) -> float:
    return float((ours.double() - want.double()).norm() / want.double().norm())


def _compare(
    name: str,
    ours: torch.Tensor,
    want: torch.Tensor,
    one_shot: torch.Tensor,
    tp: TorchDistributedGroup,
) -> None:
    error = _error(ours, want)
    of_rank_0 = ours.clone()
    dist.broadcast(of_rank_0, 0)
    is_rank_0s, is_one_shots = torch.equal(of_rank_0, ours), torch.equal(one_shot, ours)
    if not (error < _MAX_ERROR and is_rank_0s and is_one_shots):
        wrong = ((ours.double() - want).abs().amax(-1) > 1).nonzero().flatten().tolist()
        raise RuntimeError(
            f"rank {tp.rank}: {name}: error {error:.2e}, equal to rank 0's: {is_rank_0s}, to "
            f"one-shot, eager: {is_one_shots}; far off in rows {wrong[:8]} ({len(wrong)})"
        )


class _LateRank:
    """Puts this rank's stream to sleep at random moments, other ones on each rank."""

    def __init__(self, rank: int) -> None:
        self._random = random.Random(rank)

    def __call__(self) -> None:
        if self._random.random() < _IS_LATE:
            cycles = self._random.randrange(_MAX_SLEEP_CYCLES)
            torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


def check_delays(places: Places, tp: TorchDistributedGroup, hidden_size: int) -> None:
    """Passes of both ways by turns, of changing sizes and inputs, eager and replayed, while ranks
    are late at random. Raises RuntimeError where a bit differs from what a pass gives alone."""
    cases = [
        Case(tp.rank, num_tokens, hidden_size, seed)
        for num_tokens in _DELAYED_TOKENS
        for seed in _DELAYED_SEEDS
    ]
    alone, passes, graphs = [], [], []
    late, chosen = _LateRank(tp.rank), random.Random(0)
    for case in cases:
        tp.barrier()
        alone.append(case.one_shot_pass(places, on_time))
        torch.cuda.synchronize()
        ways: tuple[Pass, Pass] = (case.one_shot_pass, case.two_shot_pass)
        passes.append(ways)
        graphs.append([captured(partial(way, places, late)) for way in ways])
    num_wrong = torch.zeros((2, 2), dtype=torch.int64, device=cases[0].residual.device)
    for _ in range(_DELAYED_PASSES):
        index, way = chosen.randrange(len(cases)), chosen.randrange(2)
        is_graphed = chosen.randrange(2)
        if is_graphed:
            late()
            graph, found = graphs[index][way]
            graph.replay()
        else:
            found = passes[index][way](places, late)
        for ours, expected in zip(found, alone[index], strict=True):
            num_wrong[way, is_graphed] += (ours != expected).sum()
    if num_wrong.any():
        raise RuntimeError(
            f"rank {tp.rank}: wrong elements with late ranks, [one-shot, two-shot] by [eager, "
            f"graph]: {num_wrong.tolist()}"
        )


def report_nccl(tp: TorchDistributedGroup, hidden_size: int) -> list[str]:
    """What a chain of joins over NCCL gives, eagerly and in graphs, with our norms, which are
    launched as dependents, and with plain torch operations, beside the latter run one by one."""
    lines = []
    for num_tokens in _NCCL_TOKENS:
        chain = _NcclChain(tp, Case(tp.rank, num_tokens, hidden_size))
        errors = {
            "our norms, eager": chain.worst(chain.fused, False),
            "our norms, graph": chain.worst(chain.fused, True),
            "plain, eager": chain.worst(chain.plain, False),
            "plain, graph": chain.worst(chain.plain, True),
        }
        for name, error in errors.items():
            verdict = "right" if error < _MAX_NCCL_ERROR else "WRONG"
            lines.append(f"NCCL, {num_tokens} tokens, {name}: {verdict} (error {error:.1e})")
    return lines


class _NcclChain:
    """Joins one after the other, each rank's product depending on the last norm."""

    def __init__(self, tp: TorchDistributedGroup, case: Case) -> None:
        self._tp = tp
        self._weight = case.weight
        self._own_weight = case.parts[0][0].contiguous()
        self._given = case.residual.clone()
        self._graphs: list[torch.cuda.CUDAGraph] = []

    def fused(self) -> torch.Tensor:
        stream = self._given.clone()
        hidden = rms_norm(stream, self._weight, EPS)
        for _ in range(_NCCL_JOINS):
            part = rms_norm(hidden, self._own_weight, EPS)
            total = self._tp.all_reduce(part.unsqueeze(0))
            hidden = add_rms_norm_(total, stream, self._weight, EPS)
        return stream

    def plain(self, after: Callable[[], None] = on_time) -> torch.Tensor:
        stream = self._given.clone()
        hidden = _plain_norm(stream.float(), self._weight.float()).to(stream.dtype)
        for _ in range(_NCCL_JOINS):
            part = _plain_norm(hidden.float(), self._own_weight.float()).to(stream.dtype)
            after()
            total = self._tp.all_reduce(part)
            after()
            stream = (stream.float() + total.float()).to(stream.dtype)
            hidden = _plain_norm(stream.float(), self._weight.float()).to(stream.dtype)
        return stream

    def worst(self, run: Callable[[], torch.Tensor], in_graph: bool) -> float:
        """The largest error on any rank over several inputs."""
        graph, out = captured(run) if in_graph else (None, self._given)
        if graph is not None:
            self._graphs.append(graph)
        worst = torch.zeros((), dtype=torch.float64, device=self._given.device)
        for seed in range(_NCCL_REPLAYS):
            generator = torch.Generator(self._given.device).manual_seed(seed)
            self._given.normal_(generator=generator)
            if graph is not None:
                graph.replay()
            else:
                out = run()
            found = out.clone()
            want = self.plain(torch.cuda.synchronize)
            error = torch.tensor(_error(found, want), dtype=torch.float64).to(worst.device)
            worst = torch.maximum(worst, error.nan_to_num(nan=torch.inf))
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        return float(worst)
