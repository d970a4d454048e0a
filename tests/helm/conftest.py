"""Helm, or a skip that says why there is none here."""

import pytest

from tests.helm.rendering import Renderer
from tests.programs import needed


@pytest.fixture(scope="session")
def renderer():
    return Renderer(needed("helm"))
