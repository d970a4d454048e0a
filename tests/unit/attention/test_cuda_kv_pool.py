"""Which pool a device gets: kernels where the device has them, torch elsewhere."""

from dataclasses import replace

import pytest
import torch

from attention.memory.cuda_kv_pool import (
    CudaFp8MHATokenToKVPool,
    CudaMHATokenToKVPool,
    mha_pool_class,
)
from attention.memory.fp8_kv_pool import Fp8MHATokenToKVPool
from attention.memory.token_to_kv_pool import MHATokenToKVPool
from tests.unit.attention.cases import CaseSpec, build_case, rows_of

BF16 = torch.bfloat16
E4M3 = torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("kv_dtype", "capability", "pool"),
    [
        (BF16, None, MHATokenToKVPool),
        (BF16, (8, 0), CudaMHATokenToKVPool),
        (torch.float32, (9, 0), MHATokenToKVPool),
        (E4M3, None, Fp8MHATokenToKVPool),
        (E4M3, (8, 0), Fp8MHATokenToKVPool),
        (E4M3, (8, 6), Fp8MHATokenToKVPool),
        (E4M3, (8, 9), CudaFp8MHATokenToKVPool),
        (E4M3, (9, 0), CudaFp8MHATokenToKVPool),
        (E4M3, (12, 0), CudaFp8MHATokenToKVPool),
    ],
)
def test_e4m3_is_written_by_triton_from_sm89_on(kv_dtype, capability, pool) -> None:
    config = build_case(CaseSpec(rows_of((0, 1)))).config
    assert mha_pool_class(replace(config, dtype=BF16, kv_dtype=kv_dtype), capability) is pool
