"""The kernels of kept weights, by Triton's interpreter."""

import pytest

from tests.fakes.interpreted import TIMEOUT_S, check_by_interpreter

pytest.importorskip("triton", reason="comes with torch for CUDA only")


@pytest.mark.timeout(TIMEOUT_S)
def test_kernels_compute_what_dequantised_weights_do_and_join_splits_of_any_order() -> None:
    check_by_interpreter(
        "tests.fakes.interpreted_quantised",
        "tests.fakes.interpreted_int4",
        "tests.fakes.interpreted_splits",
    )


@pytest.mark.timeout(TIMEOUT_S)
def test_experts_take_rounded_rows_wherever_they_lie() -> None:
    check_by_interpreter("tests.fakes.interpreted_expert_rows")


@pytest.mark.timeout(TIMEOUT_S)
def test_rows_are_gathered_by_expert_and_large_blocks_come_first() -> None:
    check_by_interpreter("tests.fakes.interpreted_gather")
