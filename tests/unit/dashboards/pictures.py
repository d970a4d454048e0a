"""What a dashboard's picture says of itself: the panels it shows, as a text chunk of the PNG.

So that a test can tell a picture of yesterday's dashboard from one of today's. Knows no drawing.
"""

import json
import struct
from collections.abc import Iterator
from pathlib import Path

from tests.unit.dashboards.reading import Dashboard

KEYWORD = "panels"
_SIGNATURE_BYTES = 8
_CRC_BYTES = 4


def panels_text(dashboard: Dashboard) -> str:
    """Titles and kinds of the panels in their order."""
    return json.dumps([[panel.title, panel.kind] for panel in dashboard.panels])


def panels_shown(picture: Path) -> str | None:
    """The panels_text of the dashboard that was drawn; None where the picture does not say."""
    for kind, data in _chunks(picture.read_bytes()):
        keyword, _, text = data.partition(b"\0")
        if kind == b"tEXt" and keyword == KEYWORD.encode():
            return text.decode("latin-1")
    return None


def _chunks(png: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Kind and data of every chunk (PNG specification, section 5.3)."""
    position = _SIGNATURE_BYTES
    while position < len(png):
        length, kind = struct.unpack_from(">I4s", png, position)
        start = position + 8
        yield kind, png[start : start + length]
        position = start + length + _CRC_BYTES
