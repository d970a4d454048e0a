"""An ingress that watches a folder, and what it says of it."""

import logging

import pytest

from tests.fakes.small_adapters import LocalBoard
from tests.fakes.watching_ingress import Ingress


@pytest.fixture
def ingress(tmp_path):
    (tmp_path / "adapters").mkdir()
    return Ingress(tmp_path / "adapters", LocalBoard())


@pytest.fixture
def warnings(caplog):
    caplog.set_level(logging.INFO, "service.adapters.folder_watch")
    return lambda: [record.getMessage() for record in caplog.records]
