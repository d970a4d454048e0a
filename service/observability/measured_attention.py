"""What `auto-tuned` measured at an engine's start, as a metric that never changes."""

from collections.abc import Iterator, Sequence

from prometheus_client.core import GaugeMetricFamily

from workers.engine.protocol import AttentionMeasurementRecord

_LABELS = ("phase", "backend", "rows", "new_tokens", "prefix_tokens", "lengths", "is_taken")


def measured_attention(times: Sequence[AttentionMeasurementRecord]) -> Iterator[GaugeMetricFamily]:
    """One family with a sample for each candidate of each step; none where nothing was measured."""
    if not times:
        return
    gauge = GaugeMetricFamily(
        "tessera_attention_measured_seconds",
        "Attention of one layer by a candidate of auto-tuned, as measured at the start.",
        None,
        _LABELS,
    )
    for one in times:
        place = map(str, (one.rows, one.new_tokens, one.prefix_tokens))
        lengths = "unlike" if one.is_uneven else "like"
        taken = "yes" if one.is_chosen else "no"
        gauge.add_metric([one.phase, one.backend, *place, lengths, taken], one.seconds)
    yield gauge
