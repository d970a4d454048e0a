"""Every GEMM worth timing and every other kernel of a step, compiled for every kind of GPU."""

import os
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

import pytest

pytest.importorskip("triton", reason="comes with torch for CUDA only")

from tests.fakes.triton_targets import OTHERS, SHARED_BYTES, expert_variants, gemm_variant
from tests.unit.workers.layers.cuda.test_other_gpus import fitting

# Newer versions than the engine is tested with warn of a default that is to change.
pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")


def shared_bytes(capability, case):
    """(the case, what its kernel takes)."""
    return case, gemm_variant(*case).compile_for(capability).metadata.shared


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("capability", SHARED_BYTES, ids=str)
def test_every_candidate_fits(capability) -> None:
    distinct = {}
    for config, bucket in fitting(capability):
        variant = gemm_variant(config, bucket)
        distinct[repr((variant.types, variant.constants, variant.options))] = config, bucket
    assert len(distinct) > 20
    context = get_context("spawn")
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=context) as processes:
        for case, taken in processes.map(partial(shared_bytes, capability), distinct.values()):
            assert taken <= SHARED_BYTES[capability], case


@pytest.mark.parametrize("capability", SHARED_BYTES, ids=str)
def test_products_of_experts_fit(capability) -> None:
    for variant in expert_variants(capability):
        taken = variant.compile_for(capability).metadata.shared
        assert taken <= SHARED_BYTES[capability], variant.constants


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("capability", SHARED_BYTES, ids=str)
def test_what_a_step_launches_beside_gemms_fits(capability, name) -> None:
    assert OTHERS[name].compile_for(capability).metadata.shared <= SHARED_BYTES[capability]
