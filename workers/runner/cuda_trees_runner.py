"""A CUDA rank that verifies trees of drafts: behind a step it lines up the path that holds.

The path is found twice from the same samples: on the device, which moves keys and values, and on
the host, which commits it (DraftingExecutor).
"""

from typing import ClassVar

import torch

from workers.config import EngineConfig
from workers.errors import ConfigError
from workers.graphs.tree_verify_graphs import TreeVerifyGraphs
from workers.graphs.verify_graphs import VerifyGraphs
from workers.runner.cuda_model_runner import CudaModelRunner, StepGraphs
from workers.runner.speculative_runner import check_branches
from workers.runner.step_inputs import BegunStep, StepInputs
from workers.runner.step_pieces import ReadableStep
from workers.runner.tree_kernels import tree_kernels
from workers.sampling.state import SampledTokens
from workers.scheduler.plan import StepPlan
from workers.speculation.device_step import DrafterStep
from workers.speculation.step_trees import LinedUp, StepTrees


class CudaTreesRunner(CudaModelRunner):
    """As CudaModelRunner, of steps that are replayed; whoever extends it lines up others. Raises as
    check_branches does, too."""

    _verify_class: ClassVar[type[VerifyGraphs]] = TreeVerifyGraphs
    _unlined: tuple[TreeVerifyGraphs, DrafterStep] | None = None

    def _place_beside(self, config: EngineConfig) -> None:
        if config.speculation is None:
            raise ConfigError("a runner of trees needs to know their shape")
        check_branches(config.speculation, self._model, self.facts.architecture)
        super()._place_beside(config)
        self._tree_kernels = tree_kernels(self._device)

    def _begin(self, plan: StepPlan) -> BegunStep:
        self._unlined = None
        return super()._begin(plan)

    def _prepare_replay(self, graphs: StepGraphs, plan: StepPlan) -> None:
        super()._prepare_replay(graphs, plan)
        self._unlined = None
        if isinstance(graphs, TreeVerifyGraphs):
            step = self._step_of_replay(plan)
            graphs.name_tokens(step)
            graphs.name_trees(step.trees)
            self._unlined = graphs, step

    def _step_of_replay(self, plan: StepPlan) -> DrafterStep:
        """With its drafts, and with what they stand behind: the plan names both."""
        return DrafterStep(plan, self._sampling, self._req_to_token)

    @torch.inference_mode()
    def _launch_by(self, graphs: StepGraphs | None, plan: StepPlan) -> ReadableStep:
        launched = super()._launch_by(graphs, plan)
        self._line_up_replayed()
        return launched

    @torch.inference_mode()
    def _finish_replay(self, graphs: StepGraphs, plan: StepPlan) -> ReadableStep:
        launched = super()._finish_replay(graphs, plan)
        self._line_up_replayed()
        return launched

    def _line_up_replayed(self) -> None:
        """Behind the samples, and behind what a drafter makes of all of the step's tokens."""
        unlined, self._unlined = self._unlined, None
        if unlined is None:
            return
        graphs, step = unlined
        if step.trees is not None:
            targets = step.out_cache_loc
            lined = self._tree_kernels.hold(step.trees, graphs.sampled, step.ids, targets)
            self._line_up(step.trees, lined, targets)
            self._behind_lines(step, lined)

    def _behind_lines(self, step: DrafterStep, lined: LinedUp) -> None:
        """A replayed step's rows stand as a chain's would."""

    def _line_up(self, trees: StepTrees, lined: LinedUp, targets: torch.Tensor) -> None:
        """Keys and values of each row's path come to stand where a chain's would. targets: int64
        (num_tokens,), the cache indices of the step's tokens."""
        self._token_to_kv_pool.line_up(lined.sources, targets, trees.starts, lined.run_lens)


class CudaHostTreesRunner(CudaTreesRunner):
    """Of trees that a proposer on the host has named (suffix)."""

    def _take_samples(self, sampled: SampledTokens, inputs: StepInputs) -> SampledTokens:
        """Samples stay in the order of the step's tokens."""
        taken = super()._take_samples(sampled, inputs)
        if inputs.trees is not None:
            trees = StepTrees.of_shape(inputs.trees, inputs.num_samples, self._device)
            ids, targets = inputs.batch.input_ids, inputs.batch.out_cache_loc
            lined = self._tree_kernels.hold(trees, sampled.token_ids, ids, targets)
            self._line_up(trees, lined, targets)
        return taken
