"""The HTTP routes for audio, which take forms. Parses, calls the model's handler, renders."""

from collections.abc import Callable

from fastapi import FastAPI, Request
from starlette.responses import Response

from service.api.http_replies import until_disconnect
from service.api.middleware import context_of
from service.api.multipart import read_form
from service.api.openai.transcriptions import FORM_SCHEMA, TranscriptionForm
from service.api.openapi import PathParameters, describe_form
from service.handler.directory import ModelDirectory
from service.handler.transcription import transcribe

TRANSCRIPTIONS = "/v1/audio/transcriptions"


def add_audio_routes(
    app: FastAPI,
    prefix: str,
    parameters: PathParameters,
    models_of: Callable[[Request], ModelDirectory],
) -> None:
    @app.post(
        f"{prefix}{TRANSCRIPTIONS}",
        name="transcriptions",
        openapi_extra=describe_form(FORM_SCHEMA, parameters),
    )
    async def transcriptions(request: Request) -> Response:
        context = context_of(request.scope)
        models = models_of(request)
        models.check_admission()
        with models.admitting(context.caller) as lease:
            form = TranscriptionForm(await read_form(request))
            asked = form.to_request(context.record.request_id)
            handler = models.pick(form.model, context.record)
            work = transcribe(handler, asked, context, lease)
            return form.response(await until_disconnect(request, work))
