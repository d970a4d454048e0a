"""GPUs that are not here: every kernel compiles for them and fits their shared memory.

One with little of it here, the others in tests/nightly.
"""

import pytest

pytest.importorskip("triton", reason="comes with torch for CUDA only")

from triton.compiler.errors import CompilationError

from tests.fakes.triton_targets import OTHERS, QUANTISE_KV, SHARED_BYTES, gemm_variant
from workers.layers.gemm.candidates import candidates
from workers.layers.gemm.configs import TOKEN_BUCKETS, GemmShape
from workers.layers.gemm.device_limits import DeviceLimits

# Newer versions than the engine is tested with warn of a default that is to change.
pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
SHAPES = [
    GemmShape(6144, 4096, "split"),
    GemmShape(28672, 4096, "gated"),
    GemmShape(128256, 4096, "whole"),
    # Gemma 3 12B's: rows of no multiple of 512.
    GemmShape(8192, 3840, "split"),
    GemmShape(30720, 3840, "gated"),
    GemmShape(262208, 3840, "whole"),
]
SMALL = (8, 6)


def limits_of(capability) -> DeviceLimits:
    return DeviceLimits.within(capability, SHARED_BYTES[capability])


def fitting(capability):
    """(config, bucket) of all candidates, for each of SHAPES."""
    limits = limits_of(capability)
    return [
        (config, bucket)
        for shape in SHAPES
        for bucket in TOKEN_BUCKETS
        for config in candidates(shape, bucket, limits)
    ]


@pytest.mark.parametrize("capability", SHARED_BYTES, ids=str)
def test_every_gpu_has_kernels_for_few_tokens(capability) -> None:
    limits = limits_of(capability)
    for shape in SHAPES:
        for bucket in (1, 16, 32, 64):
            found = candidates(shape, bucket, limits)
            assert len(found) >= 4, (shape, bucket)
            assert any(one.is_gemv for one in found) is (bucket == 1), (shape, bucket)
            assert all(one.shared_bytes(bucket) <= SHARED_BYTES[capability] for one in found)
    kinds = {config.kind for config, _ in fitting(capability)}
    assert capability >= (9, 0) or not kinds & {"tiled", "gated_tiled"}


def test_the_largest_of_each_kind_fits_a_small_gpu() -> None:
    largest = {}
    for config, bucket in sorted(fitting(SMALL), key=lambda one: one[0].shared_bytes(one[1])):
        largest[config.kind] = config, bucket
    assert set(largest) == {"gemv", "skinny", "gated_gemv", "gated"}
    for config, bucket in largest.values():
        compiled = gemm_variant(config, bucket).compile_for(SMALL)
        assert compiled.metadata.shared <= config.shared_bytes(bucket), config


def test_hopper_s_largest_would_not_fit_it() -> None:
    """What it is all about: the choice of an H200 asks for more than a small GPU has."""
    skinny = [one for one in fitting((9, 0)) if one[0].kind == "skinny"]
    config, bucket = max(skinny, key=lambda one: one[0].shared_bytes(one[1]))
    compiled = gemm_variant(config, bucket).compile_for(SMALL)
    assert compiled.metadata.shared > SHARED_BYTES[SMALL]
    assert not config.fits(bucket, 4096, limits_of(SMALL))


@pytest.mark.parametrize("name", OTHERS)
def test_what_a_step_launches_beside_gemms_fits_a_small_gpu(name) -> None:
    assert OTHERS[name].compile_for(SMALL).metadata.shared <= SHARED_BYTES[SMALL]


@pytest.mark.parametrize(("capability", "has_e4m3"), [((8, 6), False), ((8, 9), True)])
def test_e4m3_is_written_by_triton_from_sm89_on(capability, has_e4m3) -> None:
    """As attention.memory.cuda_kv_pool chooses its pool."""
    if has_e4m3:
        assert QUANTISE_KV.compile_for(capability).metadata.shared <= SHARED_BYTES[capability]
        return
    with pytest.raises(CompilationError, match="fp8e4nv not supported"):
        QUANTISE_KV.compile_for(capability)
