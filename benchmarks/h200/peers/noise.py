"""Random weights of a peer, as Tessera's `load_format=dummy` has them.

vLLM and SGLang draw every tensor, norms too, between -0.001 and 0.001: what a layer adds to the
stream is then lost beside the embedding, the likeliest next token hangs on the last one alone, and
streams fall onto the same few tokens. A mixture of experts reads few of its experts then: 64
streams of DeepSeek-V2-Lite's shapes took 5.2 ms a step, where reading all of them takes 7.2.
"""

from typing import Any

import torch

_STD = 0.02


@torch.no_grad()
def fill_with_noise(model: torch.nn.Module, *_: Any) -> None:
    """Norms and other vectors are ones, biases zeros, matrices noise; stands for a peer's
    initialize_dummy_weights."""
    for name, tensor in model.state_dict().items():
        if not torch.is_floating_point(tensor) or tensor.device.type == "meta":
            continue
        if name.endswith("bias"):
            tensor.zero_()
        elif tensor.dim() < 2:
            tensor.fill_(1.0)
        else:
            tensor.normal_(0.0, _STD)
