"""The page's files as they are served: read once, each with its type and the headers that bind it.

Knows no route and no server.
"""

import importlib.resources
from dataclasses import dataclass

_INDEX = "index.html"
_MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# The page runs its own scripts and asks its own origin, nothing else; nobody may frame it.
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    content: bytes
    media_type: str


def load_page() -> dict[str, PageFile]:
    """By path: `/` is the document, `/page/NAME` what it loads."""
    folder = importlib.resources.files("service.page") / "static"
    page = {}
    for file in folder.iterdir():
        path = "/" if file.name == _INDEX else f"/page/{file.name}"
        suffix = file.name[file.name.rindex(".") :]
        page[path] = PageFile(file.read_bytes(), _MEDIA_TYPES[suffix])
    return page
