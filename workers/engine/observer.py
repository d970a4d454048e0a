"""What an engine tells about each step. Knows no metric library: the service implements it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Phase = Literal["extend", "decode", "verify"]


@dataclass(frozen=True, slots=True)
class AttentionRecord:
    """Attention of one step, summed over layers: seconds, and the bytes and flops it must spend."""

    phase: Phase
    backend: str
    seconds: float
    num_bytes: int
    num_flops: int


@dataclass(frozen=True, slots=True)
class ExpertRecord:
    """What experts got since the last such record. tokens_by_part: of each part of the ranks that
    owns experts, tokens of all layers, once for every expert that a token takes. busiest_expert,
    busiest_part: how many times the mean it got, a mean over layers; 0 where there was nothing."""

    tokens_by_part: tuple[int, ...]
    busiest_expert: float
    busiest_part: float


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One finished step.

    step_s: from the first launch to the last token id on the host's side of the device.
    host_gap_s: time between the device's steps, which waited for the host although work was there,
    or in which a head read what stands behind the samples of the step before.
    draft_s: how long of step_s drafts were looked for; 0 where the step was to have none. experts:
    where they were read with the step.
    """

    phase: Phase
    step_s: float
    host_gap_s: float
    batch_size: int
    num_prefill_tokens: int
    attention: tuple[AttentionRecord, ...]
    draft_s: float = 0.0
    experts: ExpertRecord | None = None


OnStep = Callable[[StepRecord], None]
"""Called on the engine's thread after each commit; must return within microseconds."""
