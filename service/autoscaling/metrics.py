"""What the scaling policy of one model tells about its decisions."""

from prometheus_client import CollectorRegistry, Gauge

from service.autoscaling.policy import ReplicaCounts, ScalingReason, Wanted

_SIGNALS = (
    ScalingReason.WAITING,
    ScalingReason.QUEUED_TOKENS,
    ScalingReason.KV_USAGE,
    ScalingReason.REQUESTS,
)


class ScalingMetrics:
    """Of one model; the series of a signal exist from the start."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._wanted = Gauge(
            "tessera_autoscaling_wanted_replicas",
            "Replicas that the load asks for, before delays and bounds.",
            registry=self.registry,
        )
        self._target = Gauge(
            "tessera_autoscaling_target_replicas",
            "Replicas that the last decision asked Serve for.",
            registry=self.registry,
        )
        self._running = Gauge(
            "tessera_autoscaling_running_replicas",
            "Replicas that have started and do not drain.",
            registry=self.registry,
        )
        self._needed = Gauge(
            "tessera_autoscaling_needed_replicas",
            "Replicas that each signal alone would fill, as a fraction.",
            ("signal",),
            registry=self.registry,
        )
        self._reason = Gauge(
            "tessera_autoscaling_reason",
            "1 for what decided the wanted number, 0 for the others.",
            ("reason",),
            registry=self.registry,
        )
        for signal in _SIGNALS:
            self._needed.labels(signal.value)
        for reason in ScalingReason:
            self._reason.labels(reason.value)

    def on_decision(self, wanted: Wanted, counts: ReplicaCounts) -> None:
        self._wanted.set(wanted.num_replicas)
        self._target.set(counts.target)
        self._running.set(counts.running)
        for signal, needed in wanted.by_signal.items():
            self._needed.labels(signal.value).set(needed)
        for reason in ScalingReason:
            self._reason.labels(reason.value).set(reason is wanted.reason)
