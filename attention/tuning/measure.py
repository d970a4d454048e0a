"""Times candidates on a device: real backends over scratch pools, at one point after another.

Decode steps are timed as they run, in a graph from the unrotated projection on where the model
hands that over; other steps are launched from the host. Candidates of a point take turns, so that a
clock that drifts treats them alike. How a device tells time is handed in.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from attention.backends.base import AttentionBackend, GraphAttentionBackend
from attention.config import AttentionConfig
from attention.forward_batch import ForwardBatch, ForwardMode
from attention.memory.latent_kv_pool import LatentTokenToKVPool
from attention.memory.req_to_token_pool import ReqToTokenPool
from attention.memory.token_to_kv_pool import NUM_RESERVED_PAGES, TokenToKVPool
from attention.router import build_attention
from attention.routes import AttentionRoutes
from attention.timing import AttentionPhase
from attention.tuning.candidates import CandidateSet, LayerNames
from attention.tuning.layers import MeasuredLayers
from attention.tuning.points import Lengths, StepPoint
from attention.tuning.tune import PointResult

MakePool = Callable[[AttentionConfig, int], TokenToKVPool]
"""A pool of so many pages, as the engine's own will be."""

Run = Callable[[], object]

COMPILED_SECONDS = 0.25
"""A first run that takes as long has compiled kernels: else it takes tens of milliseconds."""
_MAX_SMALL_E4M3 = 0x40
"""Bytes below are e4m3 numbers below 2."""

_MODES = {
    AttentionPhase.DECODE: ForwardMode.DECODE,
    AttentionPhase.EXTEND: ForwardMode.EXTEND,
    AttentionPhase.VERIFY: ForwardMode.TARGET_VERIFY,
}


class Stopwatch(Protocol):
    """Tells a device's time."""

    def record(self, run: Run) -> Run:
        """What repeats the launches of run without the host, where the device has such a way; run
        is called for it. Else run."""

    def seconds(self, runs: Mapping[str, Run]) -> dict[str, float]:
        """Of each, the median of several turns; its memory is not in any cache when it begins."""

    def wait(self) -> None:
        """Until what was launched has ended; raises what it ended with."""


@dataclass(frozen=True, slots=True)
class _Recorded:
    """run: what was recorded, whose tensors its replay reads."""

    replay: Run
    run: Run

    def __call__(self) -> None:
        self.replay()


@dataclass(frozen=True, slots=True)
class ScratchSpace:
    """Pools for the points to come, and rows on random pages of them."""

    config: AttentionConfig
    table: ReqToTokenPool
    pool: TokenToKVPool
    pages: Lengths

    @classmethod
    def over(
        cls, config: AttentionConfig, points: Sequence[StepPoint], make_pool: MakePool
    ) -> ScratchSpace:
        """Room for the largest of the points."""
        num_pages = max(_num_pages(point, config.page_size) for point in points)
        max_rows = max(point.rows for point in points)
        pool = make_pool(config, num_pages + NUM_RESERVED_PAGES)
        _fill_with_noise(pool, config)
        pages = np.random.default_rng(0).permutation(num_pages) + NUM_RESERVED_PAGES
        table = ReqToTokenPool(max_rows, config.max_context_len, config.device)
        return cls(config, table, pool, pages.astype(np.int32))

    def batch(self, point: StepPoint, backend: AttentionBackend) -> ForwardBatch:
        """A step at the point; its rows are in the table from here on."""
        seq_lens, new = point.lengths()
        device = self.config.device
        self._write_rows(seq_lens)
        prefix = seq_lens - new
        positions = np.concatenate(
            [np.arange(p, n) for p, n in zip(prefix.tolist(), seq_lens.tolist(), strict=True)]
        )
        slots = torch.arange(point.rows, device=device)
        on_device = [torch.from_numpy(one).to(device) for one in (positions, seq_lens, new, prefix)]
        rows = slots.repeat_interleave(on_device[2])
        return ForwardBatch(
            forward_mode=_MODES[point.phase],
            batch_size=point.rows,
            num_tokens=len(positions),
            input_ids=torch.zeros(len(positions), dtype=torch.int64, device=device),
            positions=on_device[0],
            req_pool_indices=slots,
            seq_lens=on_device[1],
            extend_seq_lens=on_device[2],
            extend_prefix_lens=on_device[3],
            out_cache_loc=self.table.req_to_token[rows, on_device[0]].long(),
            seq_lens_cpu=seq_lens,
            extend_seq_lens_cpu=new,
            extend_prefix_lens_cpu=prefix,
            attn_backend=backend,
        )

    def _write_rows(self, seq_lens: Lengths) -> None:
        """Each row's cache indices, on pages that follow each other in the random order."""
        size, first = self.config.page_size, 0
        offsets = np.arange(size, dtype=np.int32)
        rows = np.zeros((len(seq_lens), int(seq_lens.max())), dtype=np.int32)
        for row, length in zip(rows, seq_lens.tolist(), strict=True):
            num_pages = -(-length // size)
            pages = self.pages[first : first + num_pages]
            row[:length] = (pages[:, None] * np.int32(size) + offsets).ravel()[:length]
            first += num_pages
        own = self.table.req_to_token[: rows.shape[0], : rows.shape[1]]
        own.copy_(torch.from_numpy(rows))


class AttentionMeasurement:
    """MeasurePoint over real backends. layers: what is called, over the scratch space.

    uses_graphs: whether decode steps of the engine replay graphs. clock: of the host.
    """

    def __init__(
        self,
        candidates: CandidateSet,
        space: ScratchSpace,
        layers: MeasuredLayers,
        stopwatch: Stopwatch,
        uses_graphs: bool,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._candidates = candidates
        self._space = space
        self._layers = layers
        self._stopwatch = stopwatch
        self._uses_graphs = uses_graphs
        self._clock = clock
        self._backends: dict[LayerNames, AttentionBackend] = {}

    @torch.inference_mode()
    def __call__(self, point: StepPoint, names: Sequence[str]) -> PointResult:
        runs: dict[str, Run] = {}
        errors: dict[str, str] = {}
        compiling_s = 0.0
        for name in names:
            start_s = self._clock()
            try:
                runs[name] = self.prepare(point, self._backend(point, name))
            except Exception as error:  # noqa: BLE001 - kernels' packages raise what they like
                errors[name] = f"{type(error).__name__}: {error}"
            first_s = self._clock() - start_s
            compiling_s += first_s if first_s >= COMPILED_SECONDS else 0.0
        seconds = self._stopwatch.seconds(runs) if runs else {}
        return PointResult(seconds, errors, compiling_s)

    def prepare(self, point: StepPoint, backend: AttentionBackend) -> Run:
        """A step at the point by a backend over the scratch space, which has been run once, to its
        end: kernels are compiled then. Raises whatever the backend does."""
        batch = self._space.batch(point, backend)
        is_decode = point.phase is AttentionPhase.DECODE
        if is_decode and self._uses_graphs and isinstance(backend, GraphAttentionBackend):
            own = backend.graph_backend_of(point.rows, batch.seq_lens_cpu)
            run = self._in_graph(own, replace(batch, is_captured=True))
        else:
            backend.init_forward_metadata(batch)
            run = self._layers.run(backend, batch)
        run()
        self._stopwatch.wait()
        return run

    def _in_graph(self, backend: GraphAttentionBackend, batch: ForwardBatch) -> Run:
        backend.init_forward_metadata_capture_cuda_graph(batch)
        run_layers = self._layers.run(backend, batch)

        def run() -> None:
            backend.record_step_tables(batch)
            run_layers()

        recorded = _Recorded(self._stopwatch.record(run), run)
        # What the host plans for a step is the same at every replay, and takes no time of the step.
        backend.before_replay(batch.batch_size, batch.seq_lens_cpu)
        return recorded

    def _backend(self, point: StepPoint, name: str) -> AttentionBackend:
        by_layer = self._candidates.layers[point.phase][name]
        names = by_layer[: self._space.config.num_layers]
        if names not in self._backends:
            space = self._space
            routes = AttentionRoutes(names, names)
            backend = build_attention(routes, space.config, space.table, space.pool)
            if self._uses_graphs and isinstance(backend, GraphAttentionBackend):
                backend.init_cuda_graph_state(space.table.max_running_requests)
            self._backends[names] = backend
        return self._backends[names]


def _fill_with_noise(pool: TokenToKVPool, config: AttentionConfig) -> None:
    """Products of zeros take less power, and a GPU then runs faster than it will."""
    if isinstance(pool, LatentTokenToKVPool):
        buffers = [pool.get_latent(layer_id) for layer_id in range(config.num_layers)]
    else:
        own = [n for n in range(config.num_layers) if config.layers[n].kv_layer_id is None]
        buffers = [buffer for layer_id in own for buffer in pool.get_kv_buffer(layer_id)]
    for buffer in buffers:
        if buffer.itemsize == 1:
            buffer.view(torch.uint8).random_(0, _MAX_SMALL_E4M3)
        else:
            buffer.normal_()


def _num_pages(point: StepPoint, page_size: int) -> int:
    seq_lens, _ = point.lengths()
    return int((-(-seq_lens // page_size)).sum())
