"""Acceptance that is pretended: which drafts of a step hold is drawn, behind the verifier's answer.

Weights of a benchmark are noise and a head's drafts hardly ever right. Everything that real drafts
launch is launched: the verifier finds out what holds, on the device too, where paths of trees are
lined up, whatever they are. Its answer is then replaced on the host, which commits what was drawn;
texts mean nothing.
"""

from collections import deque
from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.h200.drafted_decode import HeldRuns
from workers.engine.engine import Engine
from workers.graphs.draft_rows import DrawnRows
from workers.runner.ahead_executor import AheadDraftingExecutor
from workers.runner.drafting_executor import DraftingExecutor
from workers.sampling.transfer import upload
from workers.scheduler.plan import IntArray
from workers.scheduler.plan_tree import PlanTrees
from workers.speculation.chain import HostChainVerifier
from workers.speculation.tree import HeldPaths, TreeVerifier


class RunDraw(Protocol):
    def run_lens(self, rng: np.random.Generator, most: IntArray) -> npt.NDArray[np.int64]:
        """How many samples of each row hold, 1 to most: int64 (n,). most: int (n,)."""
        ...

    def expected_lens(self, most: IntArray) -> npt.NDArray[np.float64]:
        """How many that are on average: float64 (n,)."""
        ...


class EvenDraw:
    """tokens_a_step's whole part, and one more as often as the rest says: as vLLM's synthetic
    acceptance and SGLang's SGLANG_SIMULATE_ACC_LEN draw."""

    def __init__(self, tokens_a_step: float) -> None:
        self._tokens_a_step = tokens_a_step

    def run_lens(self, rng: np.random.Generator, most: IntArray) -> npt.NDArray[np.int64]:
        """See RunDraw."""
        wanted = np.floor(self._tokens_a_step + rng.random(len(most))).astype(np.int64)
        lens: npt.NDArray[np.int64] = np.clip(wanted, 1, most)
        return lens

    def expected_lens(self, most: IntArray) -> npt.NDArray[np.float64]:
        """See RunDraw."""
        whole, share = divmod(self._tokens_a_step, 1.0)
        fewer, more = np.clip(whole, 1, most), np.clip(whole + 1, 1, most)
        return np.asarray((1.0 - share) * fewer + share * more, dtype=np.float64)


class ChanceDraw:
    """Each draft with one and the same chance where those before it were right."""

    def __init__(self, chance: float) -> None:
        self._chance = chance

    def run_lens(self, rng: np.random.Generator, most: IntArray) -> npt.NDArray[np.int64]:
        """See RunDraw."""
        right = rng.random((len(most), int(most.max()))) < self._chance
        right &= np.arange(right.shape[1]) < most[:, None] - 1
        lens: npt.NDArray[np.int64] = 1 + right.cumprod(axis=1).sum(axis=1)
        return lens

    def expected_lens(self, most: IntArray) -> npt.NDArray[np.float64]:
        """See RunDraw."""
        by_len = np.cumsum(self._chance ** np.arange(int(most.max())))
        return np.asarray(by_len[most - 1], dtype=np.float64)


def chance_of(tokens_a_step: float, num_drafts: int) -> float:
    """Of a draft, so that a run of so many drafts brings so many tokens, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        mean = sum(middle**power for power in range(num_drafts + 1))
        low, high = (middle, high) if mean < tokens_a_step else (low, middle)
    return (low + high) / 2


class PretendedRuns:
    """Draws of one engine, by whatever draw is set, and their count."""

    def __init__(self) -> None:
        self.draw: RunDraw = EvenDraw(1.0)
        self.rng = np.random.default_rng(1)
        self.held = HeldRuns()
        # Of steps whose successor's drafts were made before the host had their samples.
        self.drawn_ahead: deque[npt.NDArray[np.int64]] = deque()

    def run_lens(self, most: IntArray) -> npt.NDArray[np.int64]:
        """See RunDraw. Rows without drafts are not counted."""
        lens = self.draw.run_lens(self.rng, most)
        drafted = most > 1
        self.held = HeldRuns(
            self.held.num_rows + int(drafted.sum()),
            self.held.num_tokens + int(lens[drafted].sum()),
            self.held.num_expected + float(self.draw.expected_lens(most)[drafted].sum()),
        )
        return lens


class PretendingChains(HostChainVerifier):
    """As HostChainVerifier, but for what it says."""

    def __init__(self, runs: PretendedRuns) -> None:
        self._runs = runs

    def accept(
        self, token_ids: IntArray, expected: IntArray, starts: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        """See HostVerifier."""
        super().accept(token_ids, expected, starts)
        drawn = self._runs.drawn_ahead
        if drawn:
            return drawn.popleft()
        num_samples = np.diff(starts, append=len(token_ids)).astype(np.int32)
        return self._runs.run_lens(num_samples)


def lens_ahead(runs: PretendedRuns) -> Callable[[DrawnRows], torch.Tensor]:
    """What AheadDrafts asks: the verifier on the host then says the same of the step."""

    def run_lens(drawn: DrawnRows) -> torch.Tensor:
        num_rows, num_samples = drawn.sampled.shape
        lens = runs.run_lens(np.full(num_rows, num_samples, dtype=np.int32))
        runs.drawn_ahead.append(lens)
        (on_device,) = upload([lens], drawn.drafts.device)
        return on_device

    return run_lens


class PretendingTrees(TreeVerifier):
    """As TreeVerifier, but for what it says: the path to any draft of the drawn depth holds."""

    def __init__(self, runs: PretendedRuns) -> None:
        self._runs = runs

    def accept(
        self,
        token_ids: torch.Tensor,
        input_ids: torch.Tensor,
        num_samples: IntArray,
        trees: PlanTrees,
    ) -> HeldPaths:
        """See TreeVerifier."""
        super().accept(token_ids, input_ids, num_samples, trees)
        starts = np.cumsum(num_samples) - num_samples
        rows = np.repeat(np.arange(len(num_samples)), num_samples)
        drawn = self._runs.drawn_ahead
        if drawn:
            run_lens = drawn.popleft()
        else:
            run_lens = self._runs.run_lens(np.maximum.reduceat(trees.depths, starts) + 1)
        # Of a row's tokens the first in rank is any of those at the depth.
        is_asked = trees.depths == (run_lens - 1)[rows]
        ranks = self._runs.rng.random(len(rows)) + is_asked
        is_last = ranks == np.maximum.reduceat(ranks, starts)[rows]
        holds = np.zeros(len(rows), dtype=np.bool_)
        holds[trees.paths[is_last]] = True
        # Rows of the step keep their places; within each, what holds comes first.
        num_before: npt.NDArray[np.int64] = np.cumsum(holds) - holds
        held_places = starts[rows] + num_before - num_before[starts][rows]
        others = np.arange(len(rows)) - held_places + (starts + run_lens)[rows]
        order = np.empty(len(rows), dtype=np.int64)
        order[np.where(holds, held_places, others)] = np.arange(len(rows))
        return HeldPaths(torch.from_numpy(run_lens), torch.from_numpy(order))


def pretend(engine: Engine, runs: PretendedRuns) -> None:
    """From its next step on. Raises RuntimeError for an engine whose host does not verify."""
    executor = engine._executor
    if not isinstance(executor, DraftingExecutor):
        raise RuntimeError(
            f"a {type(executor).__name__} verifies on its device: acceptance is pretended where "
            "the host tells what holds, as on GPUs"
        )
    executor._verifier = PretendingChains(runs)
    executor._tree_verifier = PretendingTrees(runs)
    if isinstance(executor, AheadDraftingExecutor):
        executor.ahead.run_lens = lens_ahead(runs)
