"""Trees of drafts by a smaller model on a rank's device. See draft_tree.py, which does the same on
the host."""

import torch

from attention.backends.base import AttentionBackend
from attention.forward_batch import ForwardBatch
from workers.models.base import CausalLM
from workers.models.token_inputs import TokenInputs
from workers.parallel.group import TPGroup
from workers.speculation.device_draft import Argmax, DeviceDraftModel
from workers.speculation.device_growth import draft_trees
from workers.speculation.device_pass import PassRows
from workers.speculation.device_step import DeviceDrafts, DrafterStep
from workers.speculation.step_trees import LinedUp, StepTrees
from workers.speculation.tree_kernels import TreeKernels


class DeviceDraftTree(DeviceDraftModel):
    """As DeviceTreeDrafter; steps without trees as DeviceDraftModel.

    All tokens of a step with trees are read where they stand before the target runs, those of the
    last depth for the first time.
    """

    names = None

    def __init__(
        self,
        model: CausalLM,
        backend: AttentionBackend,
        tp: TPGroup,
        argmax: Argmax,
        kernels: TreeKernels,
    ) -> None:
        super().__init__(model, backend, tp, argmax)
        self.kernels = kernels
        self._pool = backend.token_to_kv_pool

    def propose(self, step: DrafterStep) -> DeviceDrafts:
        if step.trees is None:
            return super().propose(step)
        return draft_trees(self, self._passes, step, step.trees)

    def before(self, step: DrafterStep) -> None:
        if step.trees is None:
            super().before(step)
            return
        plan, trees = step.plan, step.trees
        step.place_tokens()
        rows = PassRows(
            plan.slots,
            plan.prefix_lens,
            plan.num_new_tokens,
            plan.out_cache_loc,
            trees.shape.depths,
        )
        self.read(step.ids, self._passes.prepare(rows, step.ids, trees.visibility()))

    def read_tree(
        self, ids: torch.Tensor, carried: torch.Tensor, batch: ForwardBatch, newest: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As TreeDrafter.read_tree; nothing is handed on."""
        hidden = self._model.forward_rows(TokenInputs(ids, batch.positions), batch, newest).hidden
        return self._model.compute_logits(hidden), carried

    def line_up(self, trees: StepTrees, lined: LinedUp, targets: torch.Tensor) -> None:
        """As DeviceTreeDrafter.line_up."""
        self._pool.line_up(lined.sources, targets, trees.starts, lined.run_lens)
