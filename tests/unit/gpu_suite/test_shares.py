"""How many processes the GPU suite takes, and what each may use."""

import pytest

from tests.gpu.shares import CONTEXT_BYTES, GIB, HUNGRIEST_BYTES, USUAL_BYTES, shares_of

H100_BYTES = 81559 << 20
H200_BYTES = 143771 << 20


@pytest.mark.parametrize(
    ("total_bytes", "num_cores", "expected"),
    [(H100_BYTES, 16, 16), (H100_BYTES, 64, 16), (H200_BYTES, 64, 29), (24 * GIB, 16, 5)],
)
def test_memory_or_cores_limit_the_processes(total_bytes, num_cores, expected):
    shares = shares_of(total_bytes, total_bytes, num_cores)
    assert shares.num_processes == expected
    assert expected * USUAL_BYTES <= 0.95 * total_bytes
    assert shares.memory_share * total_bytes == pytest.approx(HUNGRIEST_BYTES - CONTEXT_BYTES)


def test_few_processes_may_use_all_that_there_is():
    shares = shares_of(H100_BYTES, H100_BYTES, 2)
    assert 2 * (shares.memory_share * H100_BYTES + CONTEXT_BYTES) > 0.94 * H100_BYTES


def test_memory_that_others_use_is_not_shared_out():
    assert shares_of(20 * GIB, H100_BYTES, 16).num_processes == 4


@pytest.mark.parametrize("num_processes", [0, 17])
def test_a_number_of_processes_that_cannot_run_is_refused(num_processes):
    with pytest.raises(ValueError, match="from 1 to 16 can run"):
        shares_of(H100_BYTES, H100_BYTES, 16, num_processes)


def test_a_gpu_that_is_full_is_refused():
    with pytest.raises(ValueError, match="from 1 to 0 can run"):
        shares_of(2 * GIB, H100_BYTES, 16)
