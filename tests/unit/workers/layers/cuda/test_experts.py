"""Mixtures of experts: the kernels by Triton's interpreter."""

import pytest

from tests.fakes.interpreted import TIMEOUT_S, check_by_interpreter

pytest.importorskip("triton", reason="comes with torch for CUDA only")


@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize(
    "checks",
    [
        "tests.fakes.interpreted_kernels",
        "tests.fakes.interpreted_expert_adapters",
        pytest.param("tests.fakes.interpreted_adapters", marks=pytest.mark.nightly),
    ],
)
def test_kernels_compute_what_plain_torch_does(checks) -> None:
    check_by_interpreter(checks)
