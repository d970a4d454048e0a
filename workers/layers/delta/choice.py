"""Who computes the gated delta rule: fla-core's Triton kernels on a GPU where they are installed,
plain torch elsewhere."""

import importlib
import logging
from types import ModuleType

import torch

from workers.layers.delta.rule import DeltaInputs, DeltaOutputs, DeltaRule, delta_rule_in_torch

logger = logging.getLogger(__name__)
_KERNELS = "fla.ops.gated_delta_rule"


def delta_rule_for(device: torch.device) -> DeltaRule:
    """The log says where a GPU has no kernels."""
    if device.type != "cuda":
        return delta_rule_in_torch
    try:
        kernels = importlib.import_module(_KERNELS)
    except ImportError as error:
        logger.warning("the gated delta rule runs in plain torch: no fla-core (%s)", error)
        return delta_rule_in_torch
    return _over_kernels(kernels)


def _over_kernels(kernels: ModuleType) -> DeltaRule:
    def by_kernels(inputs: DeltaInputs, state: torch.Tensor | None) -> DeltaOutputs:
        is_step = inputs.q.shape[1] == 1 and state is not None
        run = (
            kernels.fused_recurrent_gated_delta_rule if is_step else kernels.chunk_gated_delta_rule
        )
        q, k, v, g, beta = (x.contiguous() for x in inputs)
        made, after = run(
            q,
            k,
            v,
            g=g,
            beta=beta,
            initial_state=state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        return DeltaOutputs(made, after)

    return by_kernels
