"""What is told of a kernel within a step."""

import pytest

from benchmarks.h200.latent_step import KERNELS, share_of

STEP = [
    ("gemm", 0.0, 10.0),
    ("void get_mla_metadata_kernel()", 10.0, 2.0),
    ("void flash_fwd_splitkv_mla_kernel<A>()", 12.0, 100.0),
    # Launched early: it runs from 100 on and ends 5 us after what it waits for.
    ("void flash_fwd_mla_combine_kernel<A>()", 100.0, 17.0),
    ("gemm", 117.0, 10.0),
    ("void flash_fwd_splitkv_mla_kernel<A>()", 130.0, 110.0),
]


def test_the_kernel_that_takes_most_is_told_alone_and_with_what_belongs_to_it() -> None:
    share = share_of(STEP, KERNELS["flashmla"])
    assert "splitkv" in share.name
    assert share.num_calls == 2
    assert share.alone_us == 105.0
    # 2 + 100 + 5, and 113 after the last gemm, of which 3 are a wait.
    assert share.company_us == (107.0 + 113.0) / 2


def test_another_backends_kernels_are_not_taken_for_ours() -> None:
    with pytest.raises(ValueError, match="no kernel"):
        share_of(STEP, KERNELS["fa3"][:1])
