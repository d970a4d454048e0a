"""Paths as clients write them: with a slash at their end, or asked for by HEAD."""

import copy

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.types import ASGIApp, Receive, Scope, Send


class TrailingSlashMiddleware:
    """The outermost: `/v1/models/` is `/v1/models`, for every route.

    Nobody is redirected: a redirected client may lose its body, or its key. One slash is taken,
    never the one that is the whole path.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path: str = scope["path"]
            if path.endswith("/") and path != scope.get("root_path", "") + "/":
                scope = {**scope, "path": path[:-1]}
        await self._app(scope, receive, send)


def answer_heads(app: FastAPI) -> None:
    """Let HEAD ask for whatever GET does; call it when every route is there.

    The server leaves the body of the answer out and keeps its length.
    """
    for route in list(app.routes):
        if isinstance(route, APIRoute) and "GET" in (route.methods or ()):
            # A route of its own, as one of both methods would stand in the OpenAPI document twice;
            # a copy, as what an endpoint takes is seen by then.
            head = copy.copy(route)
            head.methods, head.include_in_schema = {"HEAD"}, False
            app.router.routes.append(head)
