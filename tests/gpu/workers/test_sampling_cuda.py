"""Sampling on the device never makes the host wait."""

from tests.gpu.needs import NEEDS_GPU
from tests.gpu.no_waiting import no_waiting
from tests.unit.workers.sampling.test_no_sync import inputs_on, run_everything

pytestmark = NEEDS_GPU


def test_cuda_reports_no_synchronisation() -> None:
    inputs = inputs_on("cuda")
    with no_waiting():
        run_everything(*inputs)
