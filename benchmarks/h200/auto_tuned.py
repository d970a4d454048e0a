"""`auto-tuned` against every fixed choice of backends, over 40 mixes of phase, batch and length.

    python -m benchmarks.h200.auto_tuned [--layers 16] [--seconds 30]

Attention of Llama-3.1-8B's shapes (32 query heads, 8 KV heads, 128 elements, bf16). Measures the
table as a start does, into a folder that is thrown away; then times each mix, which is none of the
table's points but by chance, with every candidate and with what auto-tuned takes, by turns in an
order that changes at random. Decode is a graph from the projection on; prefill is launched from the
host, and the device waits for all of its launches, so that its own time is told. A pair of backends
is one for each phase: of a mix the best pair is its phase's fastest candidate. Ratios are told with
their standard error. A mix that is above 1.02, or whose ratio's error is 0.5 % or more, is measured
again with three times the turns, which count in its place, until the error is less: what turns'
spread makes of 40 mixes is not held against it, a wrong choice is. Where the fastest was taken, or
a name that launches the same kernels, the ratio is to the turns of all these names together.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import time
from functools import partial
from pathlib import Path

import torch

from attention.backends.base import AttentionBackend, GraphAttentionBackend
from attention.config import AttentionConfig, LayerAttentionConfig
from attention.router import build_attention
from attention.routes import AskedBackends, AttentionRoutes
from attention.selection import AttentionNeeds, detect_device
from attention.timing import AttentionPhase
from attention.tuning.candidates import AUTO_TUNED
from attention.tuning.choice import TunedRoutes, rounded_point
from attention.tuning.layers import measured_layers
from attention.tuning.measure import AttentionMeasurement, ScratchSpace
from attention.tuning.points import StepPoint
from attention.tuning.router import GraphTunedAttention, build_tuned_attention
from attention.tuning.table import TuningTable
from attention.tuning.turns import Turns
from benchmarks.h200.auto_tuned_results import MixResult, Promises, alike, mix_table, repeated
from workers.config import EngineConfig
from workers.parallel.group import SingleRank
from workers.runner.attention_scratch import ScratchMeasure, make_cuda_stopwatch, make_pool
from workers.runner.attention_tuning import AttentionTuner, TuningSubject, measured_config
from workers.runner.decode_front import FusedFront

DECODE, EXTEND = AttentionPhase.DECODE, AttentionPhase.EXTEND
_DECODES = (
    (1, 700), (1, 3000), (1, 4096), (1, 12000), (1, 30000), (2, 2000), (3, 6000), (8, 500),
    (8, 2500), (8, 20000), (12, 1500), (24, 800), (24, 3500), (32, 7000), (48, 1200), (64, 2000),
    (64, 4096), (96, 900), (96, 2500), (128, 1500), (200, 600), (256, 1000),
)  # fmt: skip
_UNLIKE = ((16, 2900), (64, 1900), (48, 3500), (128, 1000))
_EXTENDS = (
    (1, 512, 0), (1, 2048, 0), (1, 6000, 0), (1, 1000, 6000), (1, 2048, 20000), (2, 3000, 0),
    (4, 700, 0), (8, 900, 0), (16, 400, 1000), (32, 200, 2000), (64, 100, 0), (1, 100, 3000),
)  # fmt: skip
_MIXED = ((64, 8, 1500), (128, 12, 900))
MIXES = (
    *(StepPoint(DECODE, rows, 1, keys - 1) for rows, keys in _DECODES),
    *(StepPoint(DECODE, rows, 1, keys - 1, True) for rows, keys in _UNLIKE),
    *(StepPoint(EXTEND, *work) for work in _EXTENDS),
    *(StepPoint(EXTEND, *work, True) for work in _MIXED),
)
TURNS = Turns(least=19, most=61, seconds=0.03)
MORE_TURNS = Turns(least=57, most=183, seconds=0.09)
_KV_BYTES = 2 * 8 * 128 * 2
_MAX_KEYS = 1 << 18


def subject_of(num_layers: int) -> TuningSubject:
    dtype, device = torch.bfloat16, torch.device("cuda", 0)
    shapes = AttentionConfig(
        num_layers=num_layers,
        tp_q_head_num=32,
        tp_k_head_num=8,
        head_dim=128,
        v_head_dim=128,
        max_context_len=32768,
        page_size=1,
        dtype=dtype,
        kv_dtype=dtype,
        device=device,
        layers=(LayerAttentionConfig(),) * num_layers,
    )
    needs = AttentionNeeds(dtype, dtype, needs_mixed_batches=True)
    asked = AskedBackends(AUTO_TUNED, AUTO_TUNED)
    scratch = num_layers * _KV_BYTES * _MAX_KEYS
    return TuningSubject(asked, detect_device(device), needs, shapes, scratch, FusedFront())


class Mixes:
    """Every candidate and auto-tuned over one scratch space."""

    def __init__(self, tuned: TunedRoutes, subject: TuningSubject) -> None:
        candidates = tuned.candidates
        config = measured_config(subject, candidates.page_size)
        self._space = ScratchSpace.over(config, MIXES, make_pool)
        self._stopwatch = make_cuda_stopwatch(config.device)
        layers = measured_layers(config, subject.front)
        self._measurement = AttentionMeasurement(
            candidates, self._space, layers, self._stopwatch, uses_graphs=True
        )
        self._tuned = tuned
        pools = (self._space.table, self._space.pool)
        self._auto = build_tuned_attention(tuned, config, *pools)
        self._fixed = {
            (phase, name): build_attention(AttentionRoutes(names, names), config, *pools)
            for phase in (DECODE, EXTEND)
            for name, names in candidates.layers[phase].items()
            if name in rivals(tuned.table, phase)
        }
        max_rows = self._space.table.max_running_requests
        for backend in (self._auto, *self._fixed.values()):
            if isinstance(backend, GraphAttentionBackend):
                backend.init_cuda_graph_state(max_rows)

    @torch.inference_mode()
    def measure(self, mix: StepPoint, turns: Turns = TURNS) -> MixResult:
        by_name: dict[str, AttentionBackend] = {
            name: one for (phase, name), one in self._fixed.items() if phase is mix.phase
        }
        by_name[AUTO_TUNED] = self._auto
        runs = {name: self._measurement.prepare(mix, one) for name, one in by_name.items()}
        times = self._stopwatch.turns(runs, turns)
        tuned, taken = self._tuned, self._taken(mix)
        predicted = tuned.table.choose(rounded_point(mix)).reason(tuned.num_layers)
        names = alike(tuned.table, mix.phase, taken)
        return MixResult(mix, times, taken, predicted, self._space.config.num_layers, names)

    def _taken(self, mix: StepPoint) -> str:
        batch = self._space.batch(mix, self._auto)
        if mix.phase is DECODE and isinstance(self._auto, GraphTunedAttention):
            own = self._auto.graph_backend_of(mix.rows, batch.seq_lens_cpu)
            return own.capability.name
        return self._auto.name_of(batch)


def rivals(table: TuningTable, phase: AttentionPhase) -> set[str]:
    """Who can attend: those that were left out because another one stands for them, too."""
    stood_for = {one.name for one in table.left_out if one.phase is phase and one.stand_in}
    return {*table.contenders(phase), *stood_for}


def tune(subject: TuningSubject, max_seconds: float) -> TunedRoutes:
    """As a start does, and keeps nothing."""
    config = EngineConfig(device="cuda", max_running_requests=256, max_step_tokens=8192)
    make_measure = partial(ScratchMeasure, config, subject.front)
    with tempfile.TemporaryDirectory() as folder:
        tuner = AttentionTuner(
            config, SingleRank(), make_measure, Path(folder), max_seconds=max_seconds
        )
        return tuner.choose(subject)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=30.0, help="of measuring the table")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    subject = subject_of(arguments.layers)
    start_s = time.monotonic()
    tuned = tune(subject, arguments.seconds)
    tuned_s = time.monotonic()
    torch.cuda.empty_cache()
    mixes = Mixes(tuned, subject)
    again = partial(mixes.measure, turns=MORE_TURNS)
    results = [repeated(mixes.measure(mix), again) for mix in MIXES]
    print(f"\n{mix_table(results)}\n")
    promises = Promises(results)
    print(promises)
    print(f"table {tuned_s - start_s:.1f} s, mixes {time.monotonic() - tuned_s:.1f} s")
    if not promises.are_kept:
        raise SystemExit("auto-tuned did not keep what it promises")


if __name__ == "__main__":
    main()
