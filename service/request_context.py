"""RequestContext: whose request it is, what is noted about it, which others it belongs to.

An API server makes one for each call; it is passed down to whoever needs it, the router included.
Knows no transport.
"""

from dataclasses import dataclass, field, replace

from service.observability.request_log.record import RequestRecord
from service.security.callers import ANONYMOUS, Caller


@dataclass(slots=True, eq=False)
class Losses:
    """Lost replicas that count against a request, all its choices taken together; the router's.

    num_replicas: of all. num_trials: of these, those that were lost while it was the only suspect.
    is_last_soon: whether the last one was lost soon after it had got the request.
    """

    num_replicas: int = 0
    num_trials: int = 0
    is_last_soon: bool = False


@dataclass(frozen=True, slots=True)
class RequestContext:
    """session: the client's own name for requests that belong together, "" for none."""

    caller: Caller = ANONYMOUS
    record: RequestRecord = field(default_factory=RequestRecord)
    session: str = ""
    losses: Losses = field(default_factory=Losses)

    def of_caller(self, caller: Caller) -> "RequestContext":
        """The same request, now that its caller is known; the record is told of it too."""
        self.record.caller = caller.name
        return replace(self, caller=caller)

    def in_session(self, name: str) -> "RequestContext":
        """The same request in the session of that name, unless it belongs to one already."""
        return self if self.session or not name else replace(self, session=name)
