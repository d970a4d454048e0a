"""Routes that tell how the service does: load as the peers tell it, metrics, what the page shows.

Behind the same keys as everything else. They are polled, so they are neither logged nor traced.
"""

from fastapi import FastAPI
from msgspec import Struct
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from starlette.responses import Response

from service.api.http_replies import json_response
from service.api.web import WebSurface

LIVE_PATH = "/page/live"
POLLED_PATHS = frozenset({LIVE_PATH, "/metrics", "/load", "/get_load"})


class ServerLoad(Struct, frozen=True):
    """As vLLM tells it: requests that have not ended, of the whole application."""

    server_load: int


class ReplicaLoad(Struct, frozen=True):
    """As SGLang tells it, of one engine; dp_rank counts them.

    num_reqs: running and waiting. num_tokens: in KV memory or still to be computed.
    """

    dp_rank: int
    num_reqs: int
    num_waiting_reqs: int
    num_tokens: int
    num_pending_tokens: int


def add_live_routes(app: FastAPI, web: WebSurface) -> None:
    @app.get("/load")
    async def show_load() -> Response:
        return json_response(ServerLoad((await web.reader.live()).num_live_requests))

    @app.get("/get_load")
    async def show_load_by_replica() -> Response:
        replicas = (await web.reader.live()).replicas
        loads = [
            ReplicaLoad(
                rank,
                replica.num_running + replica.num_waiting,
                replica.num_waiting,
                replica.num_running_tokens + replica.num_queued_tokens,
                replica.num_queued_tokens,
            )
            for rank, replica in enumerate(replicas)
        ]
        return json_response(loads)

    if web.has_metrics:

        @app.get("/metrics", include_in_schema=False)
        async def show_metrics() -> Response:
            return Response(await web.reader.text(), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    if web.page:

        @app.get(LIVE_PATH, include_in_schema=False)
        async def show_live() -> Response:
            return json_response(await web.reader.live())
