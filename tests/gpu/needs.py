"""What a test needs of the machine; where that is missing it is skipped, with the reason."""

import pytest
import torch

from attention.preferences import DeviceGeneration
from attention.registry import ATTENTION_BACKENDS
from attention.selection import detect_device, unfit_device

HAS_GPU = torch.cuda.is_available()
IS_HOPPER = HAS_GPU and detect_device(torch.device("cuda", 0)).generation is DeviceGeneration.HOPPER
NEEDS_GPU = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="no NVIDIA GPU")]
NEEDS_HOPPER = pytest.mark.skipif(not IS_HOPPER, reason="no Hopper GPU")


def needs_backend(name):
    """Skipped where the GPU or the packages are not what the backend needs, and says so."""
    why = "no NVIDIA GPU"
    if HAS_GPU:
        backend = ATTENTION_BACKENDS.get(name)
        why = unfit_device(backend.capability, detect_device(torch.device("cuda", 0)))
        why = why or backend.probe().missing
    return pytest.mark.skipif(bool(why), reason=f"{name}: {why}")


NEEDS_FA3 = pytest.mark.skipif(
    not (IS_HOPPER and ATTENTION_BACKENDS.get("fa3").probe().is_available),
    reason="no FlashAttention-3 on a Hopper GPU",
)
NEEDS_TWO_GPUS = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="fewer than two NVIDIA GPUs"
)
NEEDS_FOUR_GPUS = pytest.mark.skipif(
    torch.cuda.device_count() < 4, reason="fewer than four NVIDIA GPUs"
)
