"""What the router reports, for whoever counts it. Knows no Prometheus."""

from typing import Protocol

from service.routing.policy import RoutingReason


class RouterMetrics(Protocol):
    """Called from the event loop, a few times per request."""

    def on_routed(self, reason: RoutingReason) -> None:
        """A request was sent to a replica; more than once if it was moved."""

    def on_overhead(self, seconds: float) -> None:
        """From sending a request to its last output, what was not spent at the replica."""

    def on_pause(self, seconds: float) -> None:
        """From the loss of its replica to the next token of a stream that had begun."""

    def on_scale_up_wait(self, seconds: float) -> None:
        """That a request waited for its model to be scaled up from zero."""
