"""Which backend is tried first: the order of preference, as data.

It begins from the rules of SGLang's _get_default_attn_backend, as its published description gives
them (FIRST_IN_SGLANG), and differs where something was measured or nothing has ever run: `why` says
so. What a model's steps need (windows, draft trees, page sizes, an FP8 cache) is no rule here: who
cannot do it is passed over. Knows no backend's kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from attention.capability import ComputeCapability

_HOPPER_MAJOR = 9
_BLACKWELL_MAJOR = 10  # sm100 and sm103; sm120 has no data-centre kernels and counts as OTHER_GPU
_ROCM = "rocm"


class DeviceGeneration(StrEnum):
    """As far as the order of backends tells devices apart."""

    HOPPER = "Hopper GPU (sm90)"
    BLACKWELL = "Blackwell GPU (sm100, sm103)"
    OTHER_GPU = "other NVIDIA GPU"
    AMD_GPU = "AMD GPU (ROCm)"
    NO_GPU = "no GPU"


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """The device attention runs on. compute_capability: None unless device_type is cuda.
    device_type: as torch has it, but "rocm" for an AMD GPU, which torch calls cuda."""

    device_type: str
    name: str
    compute_capability: ComputeCapability | None

    def __str__(self) -> str:
        if self.compute_capability is None:
            return self.name
        major, minor = self.compute_capability
        return f"{self.name} (sm{major}{minor})"

    @property
    def generation(self) -> DeviceGeneration:
        if self.device_type == _ROCM:
            return DeviceGeneration.AMD_GPU
        if self.compute_capability is None:
            return DeviceGeneration.NO_GPU
        generations = {
            _HOPPER_MAJOR: DeviceGeneration.HOPPER,
            _BLACKWELL_MAJOR: DeviceGeneration.BLACKWELL,
        }
        return generations.get(self.compute_capability[0], DeviceGeneration.OTHER_GPU)


@dataclass(frozen=True, slots=True)
class Preference:
    """Backends to try in order, for MHA and GQA models and for MLA models. why_mha, why_mla: why
    that order does not begin as SGLang's does, empty where it does."""

    mha: tuple[str, ...]
    mla: tuple[str, ...]
    why_mha: str = ""
    why_mla: str = ""

    def of(self, is_mla: bool, is_deterministic: bool = False) -> tuple[str, ...]:
        """is_deterministic: the forms of them whose results depend on no batch, where there are."""
        names = self.mla if is_mla else self.mha
        forms = DETERMINISTIC_FORMS if is_deterministic else {}
        return tuple(forms.get(name, name) for name in names)


_OWN_KERNELS_FIRST = (
    "triton",
    "triton_fp8",
    "flashinfer",
    "flashinfer_fp8",
    "fa4",
    "flex",
    "torch_native",
    "torch_native_fp8",
)
_NO_RUN = "what never ran on such a GPU stands behind what runs on others"

PREFERENCES: dict[DeviceGeneration, Preference] = {
    DeviceGeneration.HOPPER: Preference(
        mha=(
            "fa3_triton",
            "fa3",
            "fa3_chunks",
            "fa3_fp8",
            "triton",
            "triton_fp8",
            "flashinfer",
            "flashinfer_fp8",
            "fa4",
            "flex",
            "torch_native",
            "torch_native_fp8",
        ),
        mla=("fa3", "flashmla", "triton", "flashinfer", "torch_native"),
        why_mha="fa3_triton is fa3 but for decode steps, where its kernel was measured as faster",
    ),
    DeviceGeneration.BLACKWELL: Preference(
        mha=(*_OWN_KERNELS_FIRST, "trtllm_mha"),
        mla=("triton", "flashinfer", "trtllm_mla", "cutlass_mla", "torch_native"),
        why_mha=_NO_RUN,
        why_mla=_NO_RUN,
    ),
    DeviceGeneration.OTHER_GPU: Preference(
        mha=_OWN_KERNELS_FIRST,
        mla=("triton", "flashinfer", "torch_native"),
        why_mha="triton needs no compiler at the first start and replays graphs without the host",
    ),
    DeviceGeneration.AMD_GPU: Preference(mha=("aiter",), mla=("aiter",)),
    DeviceGeneration.NO_GPU: Preference(
        mha=("torch_native", "torch_native_fp8"), mla=("torch_native",)
    ),
}

FIRST_IN_SGLANG: dict[DeviceGeneration, tuple[str, str]] = {
    DeviceGeneration.HOPPER: ("fa3", "fa3"),
    DeviceGeneration.BLACKWELL: ("trtllm_mha", "flashinfer"),
    DeviceGeneration.OTHER_GPU: ("flashinfer", "triton"),
    DeviceGeneration.AMD_GPU: ("aiter", "aiter"),
    DeviceGeneration.NO_GPU: ("torch_native", "torch_native"),
}
"""For MHA and GQA, and for MLA, where no draft tree is verified."""


DETERMINISTIC_FORMS = {"fa3": "fa3_deterministic", "triton": "triton_deterministic"}
"""By a backend's name, the one with its kernels whose results depend on no batch."""
