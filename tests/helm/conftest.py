"""The renderer, built once, or the reason why there is none here."""

import pytest

from tests.helm.rendering import build_renderer, missing_for_go


@pytest.fixture(scope="session")
def renderer(tmp_path_factory):
    reason = missing_for_go()
    if reason is not None:
        pytest.skip(reason)
    return build_renderer(tmp_path_factory.mktemp("renderer"))
