"""Mixtures of experts over fused kernels: which models have them."""

import pytest
import torch

pytest.importorskip("triton", reason="comes with torch for CUDA only")

from tests.fakes.tiny_models import MIXTURES, NATIVE, tiny_config
from workers.models.fused_members import has_fused_llama
from workers.models.llama_family import llama_family_spec


@pytest.mark.parametrize(
    ("name", "is_fused"),
    [
        *((name, True) for name in ("mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss")),
        *((name, False) for name in ("glm4_moe", "llama_biased")),
    ],
)
def test_which_members_are_fused(name: str, is_fused: bool) -> None:
    """GLM-4.5 rotates half a head; a dense model with a bias runs as it did."""
    spec = llama_family_spec(tiny_config({**MIXTURES, **NATIVE}[name]))
    assert has_fused_llama(spec, torch.bfloat16) is is_fused
    assert not has_fused_llama(spec, torch.float32) or spec.mixture is None
