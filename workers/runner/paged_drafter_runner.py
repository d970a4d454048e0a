"""A rank whose drafts come from a model or a head beside its own."""

from dataclasses import replace

import torch

from workers.config import EngineConfig
from workers.errors import ConfigError
from workers.loading.loader import LoadedModel
from workers.loading.weights import OnProgress
from workers.models.token_inputs import ModelOutput
from workers.parallel.group import TPGroup
from workers.runner.draft_model import DraftModel, kv_bytes_a_token
from workers.runner.eagle_drafter import EagleDrafter
from workers.runner.naming_executor import NamedStep
from workers.runner.paged_drafter import PagedDrafter, PlacedDrafter
from workers.runner.sizing import AttentionPlan
from workers.runner.speculative_runner import SpeculativeModelRunner
from workers.runner.step_inputs import StepInputs
from workers.scheduler.plan import StepPlan
from workers.speculation.config import SpeculativeConfig
from workers.speculation.history import TokenHistory
from workers.speculation.proposer import Proposer
from workers.speculation.taps import StepTaps


def load_drafter(
    config: EngineConfig, target: LoadedModel, tp: TPGroup, on_progress: OnProgress
) -> PagedDrafter:
    """Of config.speculation. Raises as DraftModel and EagleDrafter do."""
    speculation = config.speculation
    if speculation is None or speculation.model is None:
        raise ConfigError("a runner of a drafter beside the model needs to know which one")
    if speculation.method == "eagle3":
        return EagleDrafter(config, speculation.model, target, tp)
    return DraftModel(config, speculation.model, target, tp, on_progress)


class PagedDrafterRunner(SpeculativeModelRunner):
    """On CPU. Raises as SpeculativeModelRunner and load_drafter do."""

    _drafter: PagedDrafter
    _placed: PlacedDrafter

    def _plan_attention(
        self, config: EngineConfig, loaded: LoadedModel, tp: TPGroup, on_progress: OnProgress
    ) -> AttentionPlan:
        """A token takes both models' bytes of what is there for KV memory."""
        self._drafter = load_drafter(config, loaded, tp, on_progress)
        own = kv_bytes_a_token(config, loaded)
        left_bytes = config.kv_cache_bytes * own // (own + self._drafter.num_bytes_a_token())
        return super()._plan_attention(
            replace(config, kv_cache_bytes=left_bytes), loaded, tp, on_progress
        )

    def _make_proposer(self, speculation: SpeculativeConfig, history: TokenHistory) -> Proposer:
        backend = self._backend
        self._taps = StepTaps()
        self._placed = self._drafter.place(
            backend.config, self.num_pages, backend.req_to_token_pool
        )
        return self._placed.proposer(history, self._taps)

    def _model_output(self, inputs: StepInputs, wants_all: bool) -> ModelOutput:
        output = super()._model_output(inputs, wants_all)
        self._taps.put(output.taps, inputs.batch.extend_seq_lens_cpu)
        return output

    def name(self, plan: StepPlan) -> NamedStep:
        if len(plan.cleared):
            # Before who takes these places over writes there.
            self._placed.clear_tokens(torch.from_numpy(plan.cleared.astype("int64")))
        return super().name(plan)
