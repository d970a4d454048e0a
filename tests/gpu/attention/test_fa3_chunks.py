"""Chunks of positions on FlashAttention-3 against float64: the kernel reads rows of each chunk."""

import pytest

from attention import LayerAttentionConfig
from attention.backends.flash_attention_chunks import ChunkedFlashAttentionBackend
from attention.features import Feature
from tests.gpu.attention.device_cases import BF16_TOLERANCE, device_case, device_spec
from tests.gpu.needs import NEEDS_FA3, NEEDS_GPU
from tests.proofs.cells import proves
from tests.unit.attention.cases import relative_error, rows_of

pytestmark = [*NEEDS_GPU, NEEDS_FA3]

STEPS = {
    "decode": rows_of(*[(n, 1) for n in (0, 1, 127, 128, 129, 300)]),
    "extend": rows_of((0, 5), (100, 60), (128, 30), (255, 3)),
    "mixed": rows_of(*[(100 + n, 1) for n in range(33)], (120, 20), (0, 9)),
}


@proves("fa3_chunks", Feature.CHUNKS)
@pytest.mark.parametrize("page_size", [1, 16, 64, 128])
@pytest.mark.parametrize("rows", STEPS.values(), ids=STEPS.keys())
def test_rows_of_each_chunk_compute_what_the_oracle_does(rows, page_size) -> None:
    layer = LayerAttentionConfig(chunk_size=128)
    case = device_case(device_spec(rows, layer=layer, page_size=page_size))
    error = relative_error(case.run(ChunkedFlashAttentionBackend), case.run_oracle())
    assert error < BF16_TOLERANCE
