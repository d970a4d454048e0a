"""What tests of this folder compare with, run once."""

import pytest

from tests.unit.workers.engine.test_speculation import run
from workers.engine.results import GenerateResult


@pytest.fixture(scope="session")
def plain() -> list[GenerateResult]:
    """Few requests of the built-in model, without drafts. Nobody changes them."""
    return run()[0]
