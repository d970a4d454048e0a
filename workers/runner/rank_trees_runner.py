"""A rank whose drafts are trees, made on its device by a model or a head beside its own.

Plans say how many drafts a row has at each depth (RankTreeProposer); the rank chooses them, and
which of the depth before each stands behind. The path that holds is found twice from the same
samples: on the device, which lines it up in KV memory, and on the host, which commits it.
"""

import torch

from attention.routes import AskedBackends
from attention.tuning.candidates import AUTO_TUNED, is_tuned
from workers.config import EngineConfig
from workers.errors import ConfigError
from workers.loading.model_folder import read_hf_config, resolve_model_folder, text_config_of
from workers.runner.drafting_executor import rank_tree_drafting_executor
from workers.runner.executor import StepExecutor
from workers.runner.paged_drafter import PlacedDrafter
from workers.runner.rank_drafts_runner import RankDraftsRunner
from workers.runner.speculative_runner import check_branches
from workers.runner.step_inputs import StepInputs
from workers.sampling.run_drafts import DeviceTreeDrafts, RunDrafts
from workers.sampling.state import SampledTokens
from workers.speculation.config import SpeculativeConfig
from workers.speculation.device_drafter import DeviceTreeDrafter
from workers.speculation.device_step import DrafterStep
from workers.speculation.step_trees import LinedUp, StepTrees


def check_cuda_trees(config: EngineConfig, speculation: SpeculativeConfig) -> None:
    """Raises ConfigError for trees that GPUs do not verify so far. Reads no weights."""
    wanted = f"draft_tree={list(speculation.tree)} and"
    if config.tp_size > 1:
        raise ConfigError(
            f"{wanted} tp_size={config.tp_size}: trees are verified on one GPU only so far; leave "
            "draft_tree out"
        )
    if is_tuned(AskedBackends(config.prefill_backend, config.decode_backend)):
        raise ConfigError(
            f"{wanted} attention by {AUTO_TUNED}: what attends to trees is not measured; name a "
            "backend, or none"
        )
    folder = resolve_model_folder(config.model)
    if getattr(text_config_of(read_hf_config(folder)), "kv_lora_rank", None):
        raise ConfigError(
            f"{wanted} {folder.name}: only models that keep keys and values of heads verify trees; "
            "leave draft_tree out"
        )


class RankTreesRunner(RankDraftsRunner):
    """Over any device. Raises as RankDraftsRunner and check_branches do."""

    _device_drafter: DeviceTreeDrafter
    _laid_out: DrafterStep | None = None

    def _make_drafter(self, placed: PlacedDrafter) -> DeviceTreeDrafter:
        return placed.tree_drafter()

    def _place_beside(self, config: EngineConfig) -> None:
        if config.speculation is None:
            raise ConfigError("a runner of trees needs to know their shape")
        self._tree = config.speculation.tree
        check_branches(config.speculation, self._model, self.facts.architecture)
        super()._place_beside(config)

    def with_drafts(self, executor: StepExecutor) -> StepExecutor:
        num_slots, max_context_len = self._req_to_token.shape
        return rank_tree_drafting_executor(
            executor, num_slots, max_context_len, self._tree, self._mailbox.named
        )

    def _lay_out(self, inputs: StepInputs, step: DrafterStep) -> None:
        super()._lay_out(inputs, step)
        self._laid_out = step
        if step.trees is not None:
            inputs.batch.visibility = step.trees.visibility()

    def _drafts_behind(self, drafts: RunDrafts, ids: torch.Tensor) -> RunDrafts:
        trees = self._trees_laid_out()
        if trees is None:
            return super()._drafts_behind(drafts, ids)
        return DeviceTreeDrafts.of_trees(drafts, ids, trees.parents)

    def _take_samples(self, sampled: SampledTokens, inputs: StepInputs) -> SampledTokens:
        """Samples stay in the order of the step's tokens: the host finds the path that holds."""
        taken, step = super()._take_samples(sampled, inputs), self._laid_out
        if step is not None and step.trees is not None:
            kernels, targets = self._device_drafter.kernels, step.out_cache_loc
            lined = kernels.hold(step.trees, sampled.token_ids, step.ids, targets)
            self._line_up(step.trees, lined, targets)
        return taken

    def _line_up(self, trees: StepTrees, lined: LinedUp, targets: torch.Tensor) -> None:
        """As CudaTreesRunner, in both pools."""
        self._token_to_kv_pool.line_up(lined.sources, targets, trees.starts, lined.run_lens)
        self._device_drafter.line_up(trees, lined, targets)

    def _trees_laid_out(self) -> StepTrees | None:
        return None if self._laid_out is None else self._laid_out.trees
