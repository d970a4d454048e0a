"""Drafts that were right, by their place in a run, as a metric."""

from prometheus_client.core import CounterMetricFamily


def accepted_by_position(counts: tuple[int, ...]) -> CounterMetricFamily:
    """Positions count from 1."""
    family = CounterMetricFamily(
        "tessera_accepted_draft_tokens_by_position",
        "Drafts that were right, by their place in a run.",
        None,
        ("position",),
    )
    for position, count in enumerate(counts, 1):
        family.add_metric([str(position)], count)
    return family
