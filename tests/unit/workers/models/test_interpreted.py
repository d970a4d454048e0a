"""Models and heads over fused kernels, by Triton's interpreter."""

import pytest

pytest.importorskip("triton", reason="comes with torch for CUDA only")

from tests.fakes.interpreted import TIMEOUT_S, check_by_interpreter


@pytest.mark.timeout(TIMEOUT_S)
def test_kernels_models_and_heads_compute_what_plain_torch_does() -> None:
    check_by_interpreter(
        "tests.fakes.interpreted_eagle",
        "tests.fakes.interpreted_gemma",
        "tests.fakes.interpreted_mixtures",
    )
