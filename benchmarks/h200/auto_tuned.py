"""`auto-tuned` against every fixed choice of backends, over 40 mixes of phase, batch and length.

    python -m benchmarks.h200.auto_tuned [--layers 16] [--seconds 40]

Attention of Llama-3.1-8B's shapes (32 query heads, 8 KV heads, 128 elements, bf16). Measures the
table as a start does, into a folder that is thrown away; then times each mix, which is none of the
table's points but by chance, with every candidate and with what auto-tuned takes, by turns in one
run. Decode is a graph from the projection on, prefill is launched from the host. A pair of backends
is one for each phase: of a mix the best pair is its phase's fastest candidate. About 90 s.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import math
import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
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
from attention.tuning.choice import TunedRoutes
from attention.tuning.layers import measured_layers
from attention.tuning.measure import AttentionMeasurement, ScratchSpace
from attention.tuning.points import StepPoint
from attention.tuning.router import GraphTunedAttention, build_tuned_attention
from attention.tuning.stopwatch import Turns
from workers.config import EngineConfig
from workers.parallel.group import SingleRank
from workers.runner.attention_scratch import ScratchMeasure, make_pool, make_stopwatch
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
MAX_RATIO = 1.02
_KV_BYTES = 2 * 8 * 128 * 2
_MAX_KEYS = 1 << 18


@dataclass(frozen=True, slots=True)
class MixResult:
    """seconds: of all layers, by candidate and of AUTO_TUNED. taken: what that was."""

    mix: StepPoint
    seconds: Mapping[str, float]
    taken: str

    @property
    def best(self) -> str:
        return min((name for name in self.seconds if name != AUTO_TUNED), key=self.seconds.get)  # type: ignore[arg-type]

    @property
    def ratio(self) -> float:
        return self.seconds[AUTO_TUNED] / self.seconds[self.best]


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
        stopwatch = make_stopwatch(config.device, Turns(least=15, most=41))
        layers = measured_layers(config, subject.front)
        self._measurement = AttentionMeasurement(
            candidates, self._space, layers, stopwatch, uses_graphs=True
        )
        self._stopwatch = stopwatch
        self._tuned = tuned
        pools = (self._space.table, self._space.pool)
        self._auto = build_tuned_attention(tuned, config, *pools)
        self._fixed = {
            (phase, name): build_attention(AttentionRoutes(names, names), config, *pools)
            for phase in (DECODE, EXTEND)
            for name, names in candidates.layers[phase].items()
            if name in tuned.table.contenders(phase)
        }
        max_rows = self._space.table.max_running_requests
        for backend in (self._auto, *self._fixed.values()):
            if isinstance(backend, GraphAttentionBackend):
                backend.init_cuda_graph_state(max_rows)

    @torch.inference_mode()
    def measure(self, mix: StepPoint) -> MixResult:
        by_name: dict[str, AttentionBackend] = {
            name: one for (phase, name), one in self._fixed.items() if phase is mix.phase
        }
        by_name[AUTO_TUNED] = self._auto
        runs = {name: self._measurement.prepare(mix, one) for name, one in by_name.items()}
        return MixResult(mix, self._stopwatch.seconds(runs), self._taken(mix))

    def _taken(self, mix: StepPoint) -> str:
        batch = self._space.batch(mix, self._auto)
        if mix.phase is DECODE and isinstance(self._auto, GraphTunedAttention):
            own = self._auto.graph_backend_of(mix.rows, batch.seq_lens_cpu)
            return own.capability.name
        return self._auto.name_of(batch)


def show(results: list[MixResult], num_layers: int) -> None:
    print("\n| mix | us a layer, by fixed choice | auto-tuned | takes | of the best |")
    print("|---|---|---|---|---|")
    for one in results:
        fixed = sorted((s, name) for name, s in one.seconds.items() if name != AUTO_TUNED)
        times = ", ".join(f"{name} {s / num_layers * 1e6:.1f}" for s, name in fixed)
        auto = one.seconds[AUTO_TUNED] / num_layers * 1e6
        print(f"| {one.mix} | {times} | {auto:.1f} | {one.taken} | {one.ratio:.3f} |")


def sums(results: list[MixResult], names: Mapping[AttentionPhase, str]) -> float:
    return sum(one.seconds[names[one.mix.phase]] for one in results)


def summarise(results: list[MixResult], tuned: TunedRoutes) -> bool:
    """Whether both promises were kept."""
    worst = max(results, key=lambda one: one.ratio)
    over = [one for one in results if one.ratio > MAX_RATIO]
    ratios = [one.ratio for one in results]
    print(
        f"\nratio to the best fixed pair of each mix: median {statistics.median(ratios):.3f}, "
        f"worst {worst.ratio:.3f} ({worst.mix}); above {MAX_RATIO}: {len(over)} of {len(results)}"
    )
    by_phase = {phase: tuned.table.contenders(phase) for phase in (EXTEND, DECODE)}
    auto_s = sums(results, {EXTEND: AUTO_TUNED, DECODE: AUTO_TUNED})
    pairs = {
        (extend, decode): sums(results, {EXTEND: extend, DECODE: decode})
        for extend, decode in itertools.product(by_phase[EXTEND], by_phase[DECODE])
    }
    singles = {name: s for (name, decode), s in pairs.items() if name == decode}
    for text, found in (("single backend", singles), ("fixed pair", pairs)):
        if found:
            name = min(found, key=found.__getitem__)  # type: ignore[type-var, arg-type]
            share = auto_s / found[name]  # type: ignore[index]
            print(f"sum over the mixes: auto-tuned {share:.3f} of the best {text}, {name}")
    mean = math.exp(statistics.fmean(math.log(ratio) for ratio in ratios))
    print(f"geometric mean of the ratios: {mean:.4f}")
    return not over and auto_s < min(singles.values(), default=math.inf)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=40.0, help="of measuring the table")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    subject = subject_of(arguments.layers)
    config = EngineConfig(device="cuda", max_running_requests=256, max_step_tokens=8192)
    with tempfile.TemporaryDirectory() as folder:
        tuner = AttentionTuner(
            config,
            SingleRank(),
            partial(ScratchMeasure, config, subject.front),
            Path(folder),
            max_seconds=arguments.seconds,
        )
        tuned = tuner.choose(subject)
    torch.cuda.empty_cache()
    mixes = Mixes(tuned, subject)
    results = [mixes.measure(mix) for mix in MIXES]
    show(results, arguments.layers)
    if not summarise(results, tuned):
        raise SystemExit("auto-tuned did not keep what it promises")


if __name__ == "__main__":
    main()
