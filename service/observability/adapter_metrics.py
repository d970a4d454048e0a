"""Requests and tokens by adapter, beside those of their model; what a watched folder has of no use.

The first MAX_ADAPTER_LABELS names have a series each, all others share one: names come from
whoever loads adapters, and a series is for good.
"""

from prometheus_client import CollectorRegistry, Counter

from service.handler.metrics import RequestMetrics

MAX_ADAPTER_LABELS = 100
OTHERS = "_other"


class FolderMetrics:
    """Of one model's watched folder of adapters; the ingress that watches it counts. At 0 from the
    start where there is such a folder."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._refusals = Counter(
            "tessera_adapter_folder_refusals",
            "Contents of subfolders of engine.lora_folder that cannot be served.",
            registry=registry,
        )

    def on_refusal(self) -> None:
        self._refusals.inc()


class AdapterMetrics:
    """Of one model's adapters in one ingress."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._finished = Counter(
            "tessera_adapter_requests_finished",
            "Sequences with an adapter that ended.",
            ("adapter",),
            registry=registry,
        )
        self._tokens = Counter(
            "tessera_adapter_output_tokens",
            "Output tokens of sequences with an adapter.",
            ("adapter",),
            registry=registry,
        )
        self._names: set[str] = set()

    def of(self, name: str, inner: RequestMetrics) -> RequestMetrics:
        """What counts requests that have this adapter, and for inner all that there is to count."""
        if name not in self._names and len(self._names) == MAX_ADAPTER_LABELS:
            name = OTHERS
        else:
            self._names.add(name)
        return _Counted(inner, self._finished.labels(name), self._tokens.labels(name))


class _Counted:
    """RequestMetrics of one adapter."""

    def __init__(self, inner: RequestMetrics, finished: Counter, tokens: Counter) -> None:
        self._inner = inner
        self._finished = finished
        self._tokens = tokens
        self.on_accepted = inner.on_accepted
        self.on_first_token = inner.on_first_token
        self.on_vector = inner.on_vector
        self.on_tokens = inner.on_tokens
        self.on_rejected = inner.on_rejected

    def on_finished(
        self,
        reason: str,
        *,
        num_prompt_tokens: int,
        num_cached_tokens: int,
        num_output_tokens: int,
        e2e_s: float,
    ) -> None:
        self._finished.inc()
        self._tokens.inc(num_output_tokens)
        self._inner.on_finished(
            reason,
            num_prompt_tokens=num_prompt_tokens,
            num_cached_tokens=num_cached_tokens,
            num_output_tokens=num_output_tokens,
            e2e_s=e2e_s,
        )
