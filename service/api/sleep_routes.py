"""Sleep and wake by vLLM's names, behind the keys of operators."""

from collections.abc import Mapping
from typing import NoReturn

from fastapi import FastAPI, Request
from msgspec import Struct
from starlette.responses import Response

from service.api.http_replies import json_response
from service.api.middleware import record_of
from service.api.services import AdminServices
from service.errors import ApiError, ApiErrorCode
from service.routing.sleep import SleepControl
from workers.engine.rest import LEVELS

SLEEP_PATH = "/sleep"
WAKE_UP_PATH = "/wake_up"
IS_SLEEPING_PATH = "/is_sleeping"
SLEEP_PATHS = frozenset({SLEEP_PATH, WAKE_UP_PATH, IS_SLEEPING_PATH})
_MODES = ("abort", "wait")


class SleepState(Struct, frozen=True):
    """As vLLM tells it."""

    is_sleeping: bool


def add_sleep_routes(app: FastAPI, admin: AdminServices) -> None:
    def control_of(request: Request, *allowed: str) -> SleepControl:
        admin.gate.check(request.headers.get("authorization"))
        for name in request.query_params:
            if name not in (*allowed, "model"):
                _refuse(name, "is not supported here", ApiErrorCode.UNSUPPORTED_PARAMETER)
        return _named(admin.sleep, request.query_params.get("model", ""))

    @app.post(SLEEP_PATH, include_in_schema=False)
    async def sleep(request: Request) -> Response:
        control = control_of(request, "level", "mode")
        level = _chosen(request, "level", [str(one) for one in LEVELS])
        mode = _chosen(request, "mode", _MODES)
        action = f"sleep level {level} mode {mode} {control.model}"
        await admin.audit(action, record_of(request.scope).request_id)
        await control.sleep(int(level), aborts=mode == "abort")
        return Response()

    @app.post(WAKE_UP_PATH, include_in_schema=False)
    async def wake_up(request: Request) -> Response:
        control = control_of(request)
        await admin.audit(f"wake_up {control.model}", record_of(request.scope).request_id)
        await control.wake_up()
        return Response()

    @app.get(IS_SLEEPING_PATH, include_in_schema=False)
    async def is_sleeping(request: Request) -> Response:
        return json_response(SleepState(control_of(request).is_sleeping))


def _named(models: Mapping[str, SleepControl], name: str) -> SleepControl:
    """name: "" is the only one."""
    if not name:
        if len(models) > 1:
            _refuse("model", f"chooses one of {', '.join(models)}")
        return next(iter(models.values()))
    if name not in models:
        message = f"the model {name[:128]!r} does not exist"
        raise ApiError(ApiErrorCode.MODEL_NOT_FOUND, message, "model")
    return models[name]


def _chosen(request: Request, name: str, choices: list[str] | tuple[str, ...]) -> str:
    """The first is taken where nothing is said, as vLLM does."""
    value = request.query_params.get(name, choices[0])
    if value not in choices:
        _refuse(name, f"is one of {', '.join(choices)}")
    return value


def _refuse(name: str, what: str, code: ApiErrorCode = ApiErrorCode.INVALID_REQUEST) -> NoReturn:
    raise ApiError(code, f"{name[:64]} {what}", name[:64])
