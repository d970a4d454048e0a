"""An ingress without what its test does not ask."""

import pytest

from service.tokenizer.pool import TokenizerPool


@pytest.fixture
def no_tokenizer_processes(monkeypatch):
    """Where no text is encoded: three processes a model are most of what a start computes."""

    async def start(pool):
        pass

    monkeypatch.setattr(TokenizerPool, "start", start)
