"""The page's files over HTTP. Open without a key, as a key is typed there; they hold no secret."""

from fastapi import FastAPI
from starlette.responses import Response

from service.page.files import HEADERS, PageFile


def add_page_routes(app: FastAPI, page: dict[str, PageFile]) -> None:
    for path, file in page.items():
        _add_file(app, path, file)


def _add_file(app: FastAPI, path: str, file: PageFile) -> None:
    @app.get(path, include_in_schema=False)
    async def show_file() -> Response:
        return Response(file.content, headers=HEADERS, media_type=file.media_type)
