"""What a service does now, in one small structure: counters and gauges of its engines by replica.

Made of the snapshots that processes push. Counters are cumulative: who wants rates takes two of
these and divides by the difference of a replica's `pushed_s`. Knows neither Ray nor HTTP.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping

from msgspec import Struct

from service.observability.exporter import ProcessSnapshot, SampleSnapshot


class PhaseLive(Struct, frozen=True):
    """Attention of the measured steps of one phase: extend, decode or verify.

    least_seconds: what it would have taken at the hardware's limit; None where that is not known.
    """

    phase: str
    num_measured_steps: int
    seconds: float
    least_seconds: float | None


class ReplicaLive(Struct, frozen=True, kw_only=True):
    """One engine. pushed_s: when it told this, on the exporter's own clock.

    num_queued_tokens: prompt tokens not yet computed. num_running_tokens: kept in KV memory.
    num_evictable_pages: of cached prefixes that no sequence uses now.
    """

    replica: str
    model: str
    pushed_s: float
    attention_backend: str
    page_size: int
    num_running: int
    num_waiting: int
    num_queued_tokens: int
    num_running_tokens: int
    num_pages: int
    num_used_pages: int
    num_evictable_pages: int
    num_steps: int
    num_prompt_tokens: int
    num_cached_prompt_tokens: int
    num_output_tokens: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    phases: list[PhaseLive]


class LiveState(Struct, frozen=True):
    """num_live_requests: sequences that ingresses have accepted and that have not ended."""

    num_live_requests: int
    replicas: list[ReplicaLive]


class _Values:
    """The samples of one process by name."""

    def __init__(self, snapshot: ProcessSnapshot) -> None:
        self._samples: dict[str, list[SampleSnapshot]] = defaultdict(list)
        for family in snapshot.families:
            for sample in family.samples:
                self._samples[sample.name].append(sample)

    def total(self, name: str) -> int:
        return int(sum(sample.value for sample in self._samples[name]))

    def by(self, name: str, label: str) -> dict[str, float]:
        """Sums of the samples by their value of a label."""
        sums: dict[str, float] = defaultdict(float)
        for sample in self._samples[name]:
            sums[sample.labels[label]] += sample.value
        return sums

    def labels(self, name: str) -> Mapping[str, str]:
        """Of its only sample; empty where it is not there yet."""
        samples = self._samples[name]
        return samples[0].labels if samples else {}


def live_state(snapshots: Iterable[tuple[float, ProcessSnapshot]]) -> LiveState:
    """snapshots: with the second at which each was pushed, on any steady clock."""
    num_live_requests = 0
    replicas = []
    for pushed_s, snapshot in snapshots:
        values = _Values(snapshot)
        if snapshot.process == "engine":
            replicas.append(_replica(snapshot, values, pushed_s))
        else:
            num_live_requests += values.total("tessera_live_requests")
    replicas.sort(key=lambda replica: (replica.model, replica.replica))
    return LiveState(num_live_requests, replicas)


def _replica(snapshot: ProcessSnapshot, values: _Values, pushed_s: float) -> ReplicaLive:
    info = values.labels("tessera_engine_info")
    return ReplicaLive(
        replica=snapshot.replica,
        model=snapshot.labels.get("model", ""),
        pushed_s=pushed_s,
        attention_backend=info.get("attention_backend", ""),
        page_size=int(info.get("page_size", "0")),
        num_running=values.total("tessera_running_requests"),
        num_waiting=values.total("tessera_waiting_requests"),
        num_queued_tokens=values.total("tessera_queued_tokens"),
        num_running_tokens=values.total("tessera_running_tokens"),
        num_pages=values.total("tessera_kv_pages"),
        num_used_pages=values.total("tessera_kv_pages_used"),
        num_evictable_pages=values.total("tessera_kv_pages_evictable"),
        num_steps=values.total("tessera_steps_total"),
        num_prompt_tokens=values.total("tessera_prompt_tokens_total"),
        num_cached_prompt_tokens=values.total("tessera_prefix_cache_hit_tokens_total"),
        num_output_tokens=values.total("tessera_output_tokens_total"),
        num_draft_tokens=values.total("tessera_draft_tokens_total"),
        num_accepted_draft_tokens=values.total("tessera_accepted_draft_tokens_total"),
        phases=_phases(values),
    )


def _phases(values: _Values) -> list[PhaseLive]:
    counts = values.by("tessera_attention_seconds_count", "phase")
    seconds = values.by("tessera_attention_seconds_sum", "phase")
    least = values.by("tessera_attention_least_seconds_total", "phase")
    return [
        PhaseLive(phase, int(count), seconds[phase], least.get(phase))
        for phase, count in sorted(counts.items())
    ]
