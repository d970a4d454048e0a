"""Random weights of a peer, as Tessera's `load_format=dummy` has them.

vLLM and SGLang draw every tensor, norms too, between -0.001 and 0.001: what a layer adds to the
stream is then lost beside the embedding, the likeliest next token hangs on the last one alone, and
streams fall onto the same few tokens. A mixture of experts reads few of its experts then: 64
streams of DeepSeek-V2-Lite's shapes took 5.2 ms a step, where reading all of them takes 7.2.
"""

from typing import Any

import torch

_STD = 0.02
_FP8_STD = 64.0
_INT4_SCALE = 9 / 2048
_E8M0_EXPONENT = 120
_SCALES = ("weight_scale", "weight_scale_inv", "scales")
_ZEROS = "qzeros"
_PACKED = ("qweight", "weight")
_MIDDLE = 0x77777777
"""Zeros of 8 in every place, less the 1 that GPTQ's first version stores."""


@torch.no_grad()
def fill_with_noise(model: torch.nn.Module, *_: Any) -> None:
    """Norms and other vectors are ones, biases zeros, matrices noise; stands for a peer's
    initialize_dummy_weights. Quantised matrices stand for noise of the same size."""
    for name, tensor in model.state_dict().items():
        part = name.rpartition(".")[2]
        if tensor.device.type == "meta":
            continue
        if part.endswith(_SCALES):
            tensor.fill_(_scale(part, tensor.dtype))
        elif torch.is_floating_point(tensor):
            _fill(part, tensor)
        elif part == _ZEROS:
            tensor.fill_(_MIDDLE)
        elif part.endswith(_PACKED):
            tensor.view(torch.uint8).random_(0, 256)


def _fill(part: str, tensor: torch.Tensor) -> None:
    if part.endswith("bias"):
        tensor.zero_()
    elif tensor.dim() < 2:
        tensor.fill_(1.0)
    elif tensor.dtype.itemsize == 1:
        values = torch.empty(tensor.shape, dtype=torch.bfloat16, device=tensor.device)
        tensor.copy_(values.normal_(0.0, _FP8_STD).clamp_(-448.0, 448.0))
    else:
        tensor.normal_(0.0, _STD)


def _scale(part: str, dtype: torch.dtype) -> float:
    """Exponents of MXFP4 are bytes; "scales" are of integers of four bits."""
    if dtype == torch.uint8:
        return _E8M0_EXPONENT
    return _INT4_SCALE if part == "scales" else _STD / _FP8_STD
