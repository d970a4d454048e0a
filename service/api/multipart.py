"""A form with one file, read within ceilings. Knows no route."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request

from service.errors import ApiError, ApiErrorCode

_MAX_FIELDS = 32
_MAX_FIELD_BYTES = 64 << 10
_FILE = "file"
# Text that is nearly a boundary, again and again, costs its parser 0.25 ms a KiB.
_SLICE_BYTES = 16 << 10


@dataclass(frozen=True, slots=True)
class Form:
    fields: dict[str, str]
    file: bytes


async def read_form(request: Request) -> Form:
    """A form of multipart/form-data with a file called "file" and text fields, each once.

    Raises ApiError: media type, size, form, or its sender has left.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "multipart/form-data":
        message = "the body must be multipart/form-data"
        raise ApiError(ApiErrorCode.UNSUPPORTED_MEDIA_TYPE, message)
    parser = MultiPartParser(
        request.headers,
        _in_slices(request),
        max_files=1,
        max_fields=_MAX_FIELDS,
        max_part_size=_MAX_FIELD_BYTES,
    )
    try:
        form = await parser.parse()
    except ClientDisconnect as error:
        message = "the client closed the connection before its body was there"
        raise ApiError(ApiErrorCode.CLIENT_CLOSED_REQUEST, message) from error
    except MultiPartException as error:
        raise _invalid(f"the body is no form that is read here: {error.message}", None) from error
    try:
        return await _split(form)
    finally:
        await form.close()


async def _in_slices(request: Request) -> AsyncGenerator[bytes, None]:
    """The body; others have their turns between two slices of it."""
    async for chunk in request.stream():
        for start in range(0, len(chunk), _SLICE_BYTES):
            yield chunk[start : start + _SLICE_BYTES]
            await asyncio.sleep(0)


async def _split(form: FormData) -> Form:
    fields: dict[str, str] = {}
    file: UploadFile | None = None
    for name, value in form.multi_items():
        if name in fields or (name == _FILE and file is not None):
            raise _invalid(f"{name} stands in the form twice", name[:128])
        if isinstance(value, str):
            fields[name] = value
        elif name == _FILE:
            file = value
        else:
            raise _invalid(f"{name[:128]} must not be a file", name[:128])
    if file is None:
        raise _invalid("the form has no file", _FILE)
    return Form(fields, await file.read())


def _invalid(message: str, param: str | None) -> ApiError:
    return ApiError(ApiErrorCode.INVALID_REQUEST, message, param)
