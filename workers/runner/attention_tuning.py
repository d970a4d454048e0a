"""`attention_backend=auto-tuned` of one rank: measures candidates before there is any KV memory.

Rank 0 measures, or reads what an earlier start measured; the other ranks take its times, so that
all of them choose alike. Knows flags, a loaded model's geometry and a device.
"""

import logging
import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

import attention
from attention.capability import AttentionBackendError
from attention.config import AttentionConfig, LayerAttentionConfig
from attention.preferences import DeviceFacts
from attention.routes import AskedBackends
from attention.selection import AttentionNeeds
from attention.tuning.cache import (
    Facts,
    code_version,
    default_folder,
    keep_times,
    kept_times,
    package_versions,
    table_from_json,
    table_path,
    table_to_json,
    with_times,
)
from attention.tuning.candidates import CandidateSearch, CandidateSet
from attention.tuning.choice import TunedRoutes
from attention.tuning.layers import DecodeFront
from attention.tuning.points import StepLimits, StepPoint, points_to_measure
from attention.tuning.table import TuningTable
from attention.tuning.tune import MeasurePoint, tune
from workers.config import EngineConfig
from workers.parallel.group import TPGroup
from workers.runner.attention_report import tell
from workers.runner.attention_scratch import ScratchMeasure

logger = logging.getLogger(__name__)

MAX_TUNING_SECONDS = 30.0
"""Of a first start; what that leaves the next starts measure."""
MAX_MEASURED_KEYS = 1 << 18
"""Of all rows of a step: beyond, attention is as fast as memory, whoever attends."""
_MIN_MEASURED_LAYERS = 4
_CPU_SCRATCH_BYTES = 64 << 20

MEASURED_FOLDERS = (
    Path(attention.__file__).parent,
    Path(__file__).parents[1] / "layers" / "cuda",
)
"""Whose kernels times are of: what rotates and writes K and V is the fused layers' own."""

MakeMeasure = Callable[[CandidateSet, AttentionConfig, Sequence[StepPoint]], MeasurePoint]


@dataclass(frozen=True, slots=True)
class TuningSubject:
    """What is tuned for. attention: over pages of any size, of all layers. scratch_bytes: of device
    memory that nobody needs yet. front: as HeadLayers."""

    asked: AskedBackends
    device: DeviceFacts
    needs: AttentionNeeds
    attention: AttentionConfig
    scratch_bytes: int
    front: DecodeFront | None = None

    @property
    def layers(self) -> tuple[LayerAttentionConfig, ...]:
        return self.attention.layers


class AttentionTuner:
    """Chooses by measurement. make_measure: for the candidates of one pool, the config of the
    layers that are measured and the points to come. folder: of what is kept between starts."""

    def __init__(
        self,
        config: EngineConfig,
        tp: TPGroup,
        make_measure: MakeMeasure,
        folder: Path,
        clock: Callable[[], float] = time.monotonic,
        max_seconds: float = MAX_TUNING_SECONDS,
    ) -> None:
        self._config = config
        self._tp = tp
        self._make_measure = make_measure
        self._folder = folder
        self._clock = clock
        self._max_seconds = max_seconds

    def choose(self, subject: TuningSubject) -> TunedRoutes:
        """Raises AttentionBackendError where nothing fits, or all that do fail."""
        config = self._config
        search = CandidateSearch(
            subject.asked,
            subject.device,
            subject.needs,
            subject.layers,
            graphs_decode=config.enable_cuda_graphs and subject.device.device_type == "cuda",
            has_verify=config.speculative is not None,
        )
        sets = search.sets()
        if any(layer.max_encoder_tokens for layer in subject.layers):
            raise AttentionBackendError(
                "auto-tuned measures no cross-attention: ask for a backend by name"
            )
        found = [self._tuned(candidates, subject, len(sets)) for candidates in sets]
        common = set.intersection(*(set(tuned.table.seconds) for tuned in found))
        best = min(found, key=lambda tuned: mean_log_seconds(tuned, common))
        if self._tp.rank == 0:
            tell(best)
        return best

    def _tuned(
        self,
        candidates: CandidateSet,
        subject: TuningSubject,
        num_sets: int,
    ) -> TunedRoutes:
        measured = measured_config(subject, candidates.page_size)
        candidates = candidates.worth_measuring(measured)
        table = TuningTable(candidates.names)
        points = points_to_measure(self._limits(subject, measured))
        text = ""
        if self._tp.rank == 0:
            facts = _facts(candidates, subject, measured, self._config)
            path = table_path(self._folder, subject.device.name, facts)
            table = with_times(table, kept_times(path))
            measure = self._make_measure(candidates, measured, points)
            known = len(table.seconds)
            start_s = self._clock()
            limit_s = self._max_seconds / num_sets
            table = tune(table, points, measure, limit_s, self._clock, 1 if num_sets > 1 else 2)
            if len(table.seconds) > known:
                seconds = self._clock() - start_s
                logger.info("attention was measured in %.1f s, kept in %s", seconds, path)
                keep_times(path, facts, table)
            text = table_to_json(table)
        table = table_from_json(_shared(self._tp, text, measured.device))
        for phase in table.names:
            if not table.contenders(phase):
                reasons = "; ".join(f"{one.name}: {one.reason}" for one in table.left_out)
                raise AttentionBackendError(f"no attention backend works in {phase}: {reasons}")
        context = subject.attention.max_context_len
        return TunedRoutes(candidates, table, context, measured.num_layers)

    def _limits(self, subject: TuningSubject, measured: AttentionConfig) -> StepLimits:
        config = self._config
        max_keys = subject.scratch_bytes // measured.kv_bytes_per_token
        return StepLimits(
            config.max_running_requests,
            config.max_step_tokens,
            measured.max_context_len,
            min(MAX_MEASURED_KEYS, max_keys),
            config.speculative is not None,
        )


def measured_config(subject: TuningSubject, page_size: int) -> AttentionConfig:
    """The first layers of the model: all, or a power of two of them that leaves room for
    MAX_MEASURED_KEYS, so that a little more or less free memory makes no other shape. Account 0
    keeps every token of all of them."""
    whole = subject.attention
    layer_bytes = -(-whole.kv_bytes_per_token // whole.num_layers)
    fitting = subject.scratch_bytes // (MAX_MEASURED_KEYS * layer_bytes)
    if fitting < whole.num_layers:
        fitting = max(_MIN_MEASURED_LAYERS, 1 << max(0, fitting.bit_length() - 1))
    num_layers = min(whole.num_layers, fitting)
    return replace(
        whole,
        page_size=page_size,
        num_layers=num_layers,
        layers=whole.layers[:num_layers],
        has_bounded_accounts=False,
    )


def mean_log_seconds(tuned: TunedRoutes, points: Collection[StepPoint]) -> float:
    """Of the fastest at every point: what pools of other pages are compared by, over the points
    that all of them were measured at."""
    fastest = [min(at.values()) for point in points if (at := tuned.table.seconds[point])]
    return sum(map(math.log, fastest)) / max(1, len(fastest))


def tuner_for(config: EngineConfig, tp: TPGroup, front: DecodeFront | None) -> AttentionTuner:
    return AttentionTuner(config, tp, partial(ScratchMeasure, config, front), default_folder())


def _facts(
    candidates: CandidateSet,
    subject: TuningSubject,
    measured: AttentionConfig,
    config: EngineConfig,
) -> Facts:
    names = {phase.value: list(names) for phase, names in candidates.names.items()}
    return {
        "device": str(subject.device),
        "packages": package_versions(),
        "code": ", ".join(map(code_version, MEASURED_FOLDERS)),
        "shapes": repr(replace(measured, device=torch.device(measured.device.type))),
        "candidates": repr(names),
        "graphs": str(config.enable_cuda_graphs),
        "from projection": str(subject.front is not None),
    }


def _shared(tp: TPGroup, text: str, device: torch.device) -> str:
    """Rank 0's text, on every rank."""
    if tp.size == 1:
        return text
    encoded = bytearray(text.encode())
    length = torch.tensor([len(encoded)], dtype=torch.int64, device=device)
    tp.broadcast(length, 0)
    content = torch.zeros(int(length.item()), dtype=torch.uint8, device=device)
    if tp.rank == 0:
        content.copy_(torch.frombuffer(encoded, dtype=torch.uint8))
    tp.broadcast(content, 0)
    return bytes(content.tolist()).decode()
