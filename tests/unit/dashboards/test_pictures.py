"""docs/images shows the dashboards as they are."""

import pytest

from tests.unit.dashboards.pictures import panels_shown, panels_text
from tests.unit.dashboards.reading import CHART, read_dashboards

DOCS = CHART.parents[1] / "docs"


@pytest.mark.parametrize("dashboard", read_dashboards(), ids=lambda one: one.file.stem)
def test_the_picture_shows_the_panels_that_there_are(dashboard):
    picture = DOCS / "images" / f"dashboard-{dashboard.file.stem}.png"
    assert panels_shown(picture) == panels_text(dashboard), (
        "run: tests/integration/isolated.sh python -m tests.integration.render_dashboards"
    )


def test_operations_shows_the_attention_dashboard():
    assert "](images/dashboard-attention.png)" in (DOCS / "operations.md").read_text()


def test_a_picture_that_says_nothing_is_noticed(tmp_path):
    empty = tmp_path / "empty.png"
    empty.write_bytes(b"\x89PNG\r\n\x1a\n" + b"\0\0\0\0IEND\xaeB`\x82")
    assert panels_shown(empty) is None
