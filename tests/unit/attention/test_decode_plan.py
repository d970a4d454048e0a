"""Decode plans by Triton's interpreter."""

import pytest

pytest.importorskip("triton", reason="comes with torch for CUDA only")

from tests.fakes.interpreted import TIMEOUT_S, check_by_interpreter


@pytest.mark.timeout(TIMEOUT_S)
def test_chunks_are_those_that_plain_arithmetic_says() -> None:
    check_by_interpreter("tests.fakes.interpreted_decode_plan")
