"""trtllm_mha on data-centre Blackwell: what test_cells.py has not, against float64."""

import pytest

from attention.registry import ATTENTION_BACKENDS
from tests.gpu.attention.device_cases import BF16_TOLERANCE, device_spec, error_of
from tests.gpu.needs import NEEDS_GPU, needs_backend
from tests.proofs.cells import proves
from tests.unit.attention.cases import rows_of
from tests.unit.attention.visibility_cases import KINDS, build_visible

pytestmark = [*NEEDS_GPU, needs_backend("trtllm_mha")]

DRAFTS = rows_of((40, 8), (0, 5), (300, 1), (1000, 16), (64, 3))


@proves("trtllm_mha")
@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS.keys())
def test_every_kind_of_visibility(make):
    case = build_visible(device_spec(DRAFTS, page_size=64), make)
    assert error_of(case, ATTENTION_BACKENDS.get("trtllm_mha")) < BF16_TOLERANCE
