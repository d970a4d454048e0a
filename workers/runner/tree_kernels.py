"""Which kernels grow and line up trees of drafts on a device."""

import torch

from attention.kernels.providers import probe_triton
from workers.speculation.tree_kernels import TORCH_TREE_KERNELS, TreeKernels


def tree_kernels(device: torch.device) -> TreeKernels:
    """Of trees that grow there."""
    if device.type != "cuda" or probe_triton().missing:
        return TORCH_TREE_KERNELS
    # Triton comes with torch for CUDA only.
    from workers.layers.cuda.tree_states import CUDA_TREE_KERNELS

    return CUDA_TREE_KERNELS
