"""Routes that change what is served, behind keys of their own. They exist where such keys do."""

from fastapi import FastAPI, Request
from starlette.responses import PlainTextResponse, Response

from service.api.body import read_body
from service.api.middleware import record_of
from service.api.openai.adapters import LoadAdapterBody, UnloadAdapterBody
from service.api.services import AdminServices
from service.limits import Limits

LOAD_PATH = "/v1/load_lora_adapter"
UNLOAD_PATH = "/v1/unload_lora_adapter"
ADMIN_PATHS = frozenset({LOAD_PATH, UNLOAD_PATH})


def add_admin_routes(app: FastAPI, admin: AdminServices, limits: Limits) -> None:
    @app.post(LOAD_PATH, include_in_schema=False)
    async def load_lora_adapter(request: Request) -> Response:
        admin.gate.check(request.headers.get("authorization"))
        body = await read_body(request, LoadAdapterBody, limits)
        by = record_of(request.scope).request_id
        await admin.adapters.load(
            body.model, body.lora_name, body.lora_path, by, in_place=body.load_inplace
        )
        return PlainTextResponse(f"Success: LoRA adapter {body.lora_name!r} added successfully.")

    @app.post(UNLOAD_PATH, include_in_schema=False)
    async def unload_lora_adapter(request: Request) -> Response:
        admin.gate.check(request.headers.get("authorization"))
        body = await read_body(request, UnloadAdapterBody, limits)
        await admin.adapters.unload(body.model, body.lora_name, record_of(request.scope).request_id)
        return PlainTextResponse(f"Success: LoRA adapter {body.lora_name!r} removed successfully.")
