"""ASGI middleware that observes every request but those for health. Buffers nothing."""

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.request_log.observer import RequestObserver
from service.request_log.record import RequestRecord

UNMATCHED = "unmatched"


class ObservingMiddleware:
    """Inside whatever sets scope[request_id_key], outside everything else.

    quiet_paths: paths that are neither logged nor traced.
    """

    def __init__(
        self,
        app: ASGIApp,
        observer: RequestObserver,
        request_id_key: str,
        quiet_paths: frozenset[str],
    ) -> None:
        self._app = app
        self._observer = observer
        self._request_id_key = request_id_key
        self._quiet_paths = quiet_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._quiet_paths:
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        record = self._observer.begin(
            RequestRecord(scope[self._request_id_key], "http", scope["method"]),
            headers.get("traceparent", ""),
            headers.get("tracestate", ""),
        )

        async def send_observed(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = str(message["status"])
                if record.span.traceparent:
                    MutableHeaders(scope=message)["traceparent"] = record.span.traceparent
            await send(message)

        try:
            await self._app(scope, receive, send_observed)
        except Exception:
            # Whoever is further out answers for a bug.
            record.status = record.status or "500"
            record.error_code = record.error_code or "internal"
            raise
        finally:
            # The routed path with its placeholders: what a client made up is not repeated.
            record.route = getattr(scope.get("route"), "path", UNMATCHED)
            self._observer.end(record)
