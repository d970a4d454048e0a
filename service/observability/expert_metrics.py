"""What the experts of a mixture got, by the part of the ranks that computes them. Experts are no
label: a model has thousands of them.
"""

from prometheus_client import CollectorRegistry, Counter, Gauge

from workers.engine.observer import ExpertRecord


class ExpertMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self._tokens = Counter(
            "tessera_expert_tokens",
            "Tokens that experts got, once for each of them and each layer, by part of the ranks.",
            ("part",),
            registry=registry,
        )
        self._busiest = Gauge(
            "tessera_expert_busiest_ratio",
            "How many times the mean the busiest one of a layer got, a mean over layers.",
            ("of",),
            registry=registry,
        )

    def on_record(self, record: ExpertRecord) -> None:
        for part, tokens in enumerate(record.tokens_by_part):
            self._tokens.labels(str(part)).inc(tokens)
        self._busiest.labels("experts").set(record.busiest_expert)
        self._busiest.labels("parts").set(record.busiest_part)
