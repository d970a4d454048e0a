"""Times every GEMM worth timing on weights of one shape and takes the fastest. Keeps nothing.

Where a like GPU's choices are known only what is like them is worth it. A timing is of weights that
are not in the cache, and waits for the device.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from triton.runtime.errors import OutOfResources

from workers.layers.cuda.activation import gate_and_mul
from workers.layers.cuda.norm import rms_norm
from workers.layers.gemm.build import GemmBuilder, lt_configs
from workers.layers.gemm.candidates import candidates, like, lt_splits
from workers.layers.gemm.configs import (
    TOKEN_BUCKETS,
    Choices,
    Config,
    GemmConfig,
    GemmShape,
    LtConfig,
)
from workers.layers.gemm.cublaslt import CublasLtError, CublasLtUnavailableError

logger = logging.getLogger(__name__)

_NUM_TIMED_WEIGHTS = 6
_NUM_FINALISTS = 5
_MAX_LT_CONFIGS = 24
_MAX_LT_SPLIT_CONFIGS = 6
_MAX_GUESSED_LT_CONFIGS = 10
_MAX_LONG_LT_CONFIGS = 12
_LONG_TOKENS = 1024
_MIN_GAIN = 0.99
"""A GEMM has to be at least this much faster than cuBLAS's own choice to be taken."""
_ORDER = (256, 1, 64, 8192, 128, 16, 512, 32, 192, 2048, 384, 160, 4096, 1024)
"""Of buckets, the most used first: time may run out."""
_MIN_BYTES = 256 << 20
_MIN_CALLS = 8
_MIN_LONG_CALLS = 2
_LONG_CALL_TOKENS = 1024
_MIN_FREE_BYTES = 4 << 30
"""Less, and what torch keeps of ended graphs goes back to the device: a capture cannot do that."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The fastest GEMM, its seconds with its neighbours and those of cuBLAS's own choice."""

    config: Config
    seconds: float
    cublas_seconds: float


@dataclass(frozen=True, slots=True)
class Effort:
    """num_replays of a graph; share: of the calls that a careful graph has."""

    num_replays: int
    share: float


CAREFUL = Effort(num_replays=5, share=1.0)
QUICK = Effort(num_replays=1, share=0.5)


def gemm_seconds(
    gemm: Callable[[torch.Tensor], torch.Tensor],
    weights: Sequence[torch.Tensor],
    num_tokens: int,
    effort: Effort,
) -> float:
    """Seconds of one call, from replays of a graph of calls over the weights by turns.

    A graph, because launches from the host take longer than a small GEMM. With enough calls that
    the weights between two uses of one exceed any L2 cache, if there are enough weights; with so
    many tokens that arithmetic is what takes the time, a few calls do.
    """
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    graph = torch.cuda.CUDAGraph()
    start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    stop = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    num_calls = _num_calls(weights[0], num_tokens, effort)
    if _free_bytes(weights[0].device) < _MIN_FREE_BYTES:
        torch.cuda.empty_cache()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        gemm(weights[0])
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for call in range(num_calls):
                gemm(weights[call % len(weights)])
        finally:
            graph.capture_end()
        graph.replay()
        start.record()
        for _ in range(effort.num_replays):
            graph.replay()
        stop.record()
    stop.synchronize()
    graph.reset()
    milliseconds: float = start.elapsed_time(stop)
    return milliseconds / 1e3 / (effort.num_replays * num_calls)


def _free_bytes(device: torch.device) -> int:
    """What this process may still take of the device."""
    free, total = torch.cuda.mem_get_info(device)
    allowed = int(torch.cuda.get_per_process_memory_fraction(device) * total)
    return min(free, allowed - torch.cuda.memory_reserved(device))


def _num_calls(weight: torch.Tensor, num_tokens: int, effort: Effort) -> int:
    if num_tokens >= _LONG_CALL_TOKENS:
        return _MIN_LONG_CALLS
    num_bytes = weight.numel() * weight.itemsize
    return max(_MIN_CALLS, int(effort.share * -(-_MIN_BYTES // num_bytes)))


@dataclass(frozen=True, slots=True)
class Trial:
    """One number of tokens. Calls are timed between their neighbours in a layer.

    A norm before and a reader of the product after it: how far kernels overlap is part of their
    worth. guesses: what a like GPU chose for about as many tokens; empty if nobody knows.
    """

    shape: GemmShape
    weights: Sequence[torch.Tensor]
    num_tokens: int
    builder: GemmBuilder
    guesses: tuple[Config, ...] = ()

    def seconds(self, config: Config, effort: Effort) -> float:
        weights, shape = self.weights, self.shape
        x = torch.randn(
            (self.num_tokens, shape.in_features), dtype=weights[0].dtype, device=weights[0].device
        )
        scale = torch.ones_like(x[0])
        gemm = self.builder.build(config, weights[0], shape.role)

        def chain(weight: torch.Tensor) -> torch.Tensor:
            product = gemm(rms_norm(x, scale, 1e-5), weight)
            # Any kernel that reads all partial products will do.
            return product if shape.role == "gated" else gate_and_mul(product, x.dtype, "silu")

        return gemm_seconds(chain, weights, self.num_tokens, effort)

    def configs(self) -> list[Config]:
        """cuBLASLt's first: they need no compiler. Fewer where there are guesses."""
        triton = self.triton_configs()
        return [*self._lt_configs(), *triton]

    def triton_configs(self) -> list[GemmConfig]:
        every = candidates(self.shape, self.num_tokens, self.builder.limits)
        if not self.guesses:
            return every
        return like(every, [guess for guess in self.guesses if isinstance(guess, GemmConfig)])

    def _lt_configs(self) -> list[LtConfig]:
        weight = self.weights[0]
        x = weight[:1].expand(self.num_tokens, -1)
        limit = _MAX_LONG_LT_CONFIGS if self.num_tokens >= _LONG_TOKENS else _MAX_LT_CONFIGS
        limit = min(limit, _MAX_GUESSED_LT_CONFIGS) if self.guesses else limit
        configs = []
        for splits in lt_splits(self.shape, self.num_tokens):
            try:
                configs += lt_configs(self.builder.library, x, weight, splits, limit)
            except (CublasLtError, CublasLtUnavailableError) as error:
                logger.info("gemm %s in %d splits: no cuBLASLt: %s", self.shape, splits, error)
            limit = min(limit, _MAX_LT_SPLIT_CONFIGS)
        return configs


class Race:
    """A trial's candidates against each other, one timing at a time: all of them in a hurry, then
    the best with care."""

    def __init__(self, trial: Trial) -> None:
        self.trial = trial
        self._left = deque(trial.configs())
        self._quick: dict[Config, float] = {}

    def time_next(self) -> bool:
        """Time one candidate in a hurry; whether there was one."""
        if not self._left:
            return False
        config, trial = self._left.popleft(), self.trial
        try:
            self._quick[config] = trial.seconds(config, QUICK)
        except (CublasLtError, OutOfResources) as error:
            logger.info("gemm %s, %d tokens: %s: %s", trial.shape, trial.num_tokens, config, error)
        return True

    def finish(self) -> Measured:
        """The fastest of those timed so far, cuBLAS's own choice included."""
        trial, quick = self.trial, self._quick
        finalists = sorted(quick, key=quick.__getitem__)[:_NUM_FINALISTS]
        cublas_s = trial.seconds(None, CAREFUL)
        best = Measured(None, cublas_s, cublas_s)
        for config in finalists:
            seconds = trial.seconds(config, CAREFUL)
            logger.debug("  %s %.1f us", config, seconds * 1e6)
            if seconds < min(best.seconds, _MIN_GAIN * cublas_s):
                best = Measured(config, seconds, cublas_s)
        logger.info(
            "gemm %s, %d tokens: cuBLAS %.1f us, chosen %s %.1f us",
            trial.shape,
            trial.num_tokens,
            cublas_s * 1e6,
            best.config or "cuBLAS",
            best.seconds * 1e6,
        )
        return best


@dataclass(frozen=True, slots=True)
class Contest:
    """Weights of one shape, on the device, and what a like GPU chose for them."""

    shape: GemmShape
    weights: Sequence[torch.Tensor]
    guess: Choices

    def trial(self, num_tokens: int, builder: GemmBuilder) -> Trial:
        weights = self.weights[:_NUM_TIMED_WEIGHTS]
        return Trial(self.shape, weights, num_tokens, builder, self._guesses(num_tokens))

    def _guesses(self, bucket: int) -> tuple[Config, ...]:
        """The guess for a bucket, then those for the buckets beside it."""
        if bucket not in self.guess:
            return ()
        place = TOKEN_BUCKETS.index(bucket)
        beside = TOKEN_BUCKETS[max(0, place - 1) : place + 2]
        return tuple(self.guess[n] for n in (bucket, *beside) if n in self.guess)


def in_order(buckets: Iterable[int]) -> list[int]:
    """The most used first."""
    return sorted(buckets, key=_ORDER.index)


def measure(
    contest: Contest, buckets: Sequence[int], builder: GemmBuilder, max_seconds: float
) -> dict[int, Measured]:
    """By bucket the fastest of all candidates, cuBLAS's own choice included.

    After max_seconds the rest of the buckets is left out.
    """
    start_s = time.monotonic()
    todo = in_order(buckets)
    measured: dict[int, Measured] = {}
    while todo:
        left_s = start_s + max_seconds - time.monotonic()
        if left_s <= 0:
            logger.warning("gemm %s: no time to measure for %s tokens", contest.shape, todo)
            break
        deadline_s = time.monotonic() + left_s / len(todo)
        race = Race(contest.trial(todo.pop(0), builder))
        while time.monotonic() <= deadline_s and race.time_next():
            pass
        measured[race.trial.num_tokens] = race.finish()
    return measured
