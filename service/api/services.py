"""What both API servers are given. Built by service.app, faked by tests."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from service.adapters.control import AdapterControl
from service.api.auth import Authenticator
from service.api.unknown_fields import UnknownFieldsPolicy
from service.api.web import WebSurface
from service.handler.directory import ModelDirectory
from service.limits import Limits
from service.observability.request_log.observer import SILENT, RequestObserver
from service.observability.request_log.record import RequestRecord
from service.response_store.runs import Runs
from service.response_store.store import LocalResponseStore
from service.routing.sleep import SleepControl
from service.security.admin import AdminGate


def _make_local_runs() -> Runs:
    limits = Limits().of_store
    return Runs("local", LocalResponseStore(limits), limits.max_response_bytes)


Audit = Callable[[str, str], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class AdminServices:
    """What operators may change. gate: who is one. sleep: by model. audit: writes
    down what is about to be done, and by which request; raises ApiError where it cannot."""

    gate: AdminGate
    adapters: AdapterControl
    sleep: Mapping[str, SleepControl]
    audit: Audit


@dataclass(frozen=True, slots=True)
class ApiServices:
    """is_ready: whether requests can be served now. started_s: Unix time, shown as `created`.

    peek_s: a stream's response starts once its first delta is known or this time has passed, so
    that early failures still get their own status code. session_header: in lower case; names the
    session of a request over HTTP, and as metadata over gRPC. responses: under way here, and the
    store of those that have ended; by default one of this process alone. admin: what operators with
    a key for it may change; None: nothing.
    """

    models: ModelDirectory
    authenticator: Authenticator
    is_ready: Callable[[], bool]
    version: str
    started_s: int
    peek_s: float = 2.0
    session_header: str = "x-session-id"
    observer: RequestObserver = SILENT
    unknown_fields: UnknownFieldsPolicy = "refuse"
    responses: Runs = field(default_factory=_make_local_runs)
    web: WebSurface = WebSurface()
    admin: AdminServices | None = None

    def begin(self, record: RequestRecord, headers: Mapping[str, str]) -> None:
        """A request has arrived. headers: of HTTP, or gRPC's metadata, in lower case."""
        traceparent = headers.get("traceparent", "")
        self.observer.begin(record, traceparent, headers.get("tracestate", ""))

    def end(self, record: RequestRecord) -> None:
        """The last byte was sent or the client had left. Called once after begin()."""
        self.models.count_refusal(record)
        self.observer.end(record)
