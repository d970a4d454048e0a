"""A rank that makes drafts on its device, by a model or a head beside its own.

Plans come with true lengths and with DRAFT_TOKEN where drafts are to stand (DraftingExecutor). The
rank makes them, verifies them as any tokens, and sends them to the host behind the step's launch.
"""

from dataclasses import replace

import numpy as np
import torch

from workers.config import EngineConfig
from workers.loading.loader import LoadedModel
from workers.loading.weights import OnProgress
from workers.models.token_inputs import ModelOutput
from workers.parallel.group import TPGroup
from workers.runner.drafter_loading import load_drafter
from workers.runner.drafting_executor import rank_drafting_executor
from workers.runner.executor import StepExecutor, StepOutcome
from workers.runner.largest_step import largest_step
from workers.runner.model_runner import ModelRunner
from workers.runner.paged_drafter import PagedDrafter, PlacedDrafter
from workers.runner.sizing import AttentionPlan, plan_attention
from workers.runner.speculative_runner import check_forgets
from workers.runner.step_inputs import BegunStep, StepInputs
from workers.sampling.run_drafts import DeviceRunDrafts, RunDrafts
from workers.sampling.state import SampledTokens
from workers.sampling.transfer import upload
from workers.scheduler.plan import IntArray, StepPlan
from workers.speculation.chain import HostChainVerifier
from workers.speculation.device_drafter import DeviceDrafter
from workers.speculation.device_step import DrafterStep
from workers.speculation.draft_mailbox import DraftMailbox, Passed, PassedAtOnce


class RankDraftsRunner(ModelRunner):
    """Over any device. Raises as ModelRunner, load_drafter and check_forgets do.

    Every rank of a group makes the drafts, of its part of the drafter: which tokens they are, ranks
    choose among bits that they have exchanged (likeliest_tokens), so that no two can differ.
    """

    _drafter: PagedDrafter
    _device_drafter: DeviceDrafter

    def _plan_attention(
        self, config: EngineConfig, loaded: LoadedModel, tp: TPGroup, on_progress: OnProgress
    ) -> AttentionPlan:
        """A token takes both models' bytes of what is there for KV memory."""
        self._drafter = load_drafter(config, loaded, tp, on_progress)
        return plan_attention(
            config, loaded, self.num_padding_slots, tp, self._drafter.num_bytes_a_token()
        )

    def _place_beside(self, config: EngineConfig) -> None:
        check_forgets(config, self._model, self.facts.architecture)
        backend = self._backend
        self._placed = self._drafter.place(
            backend.config, self.num_pages, backend.req_to_token_pool
        )
        self._device_drafter = self._make_drafter(self._placed)
        self._mailbox = DraftMailbox(self._new_mark)
        self._taps: tuple[torch.Tensor, ...] = ()
        # The step being launched, or its piece.
        self._plan: StepPlan | None = None

    def _make_drafter(self, placed: PlacedDrafter) -> DeviceDrafter:
        return placed.device_drafter()

    def _new_mark(self) -> Passed:
        """Of the stream of this rank's device."""
        return PassedAtOnce()

    def with_drafts(self, executor: StepExecutor) -> StepExecutor:
        num_slots, max_context_len = self._req_to_token.shape
        return rank_drafting_executor(
            executor, num_slots, max_context_len, HostChainVerifier(), self._mailbox.named
        )

    def run(self, plan: StepPlan) -> StepOutcome:
        with self._mailbox.launching(plan.step_id):
            return super().run(plan)

    def run_follower(self, plan: StepPlan) -> None:
        with self._mailbox.launching(plan.step_id):
            super().run_follower(plan)

    def try_largest_step(self, config: EngineConfig) -> None:
        super().try_largest_step(config)
        self._clear_tokens(largest_step(self.scheduler_config(config)).out_cache_loc)

    @torch.inference_mode()
    def prepare_while_idle(self) -> bool:
        return super().prepare_while_idle() or self._placed.prepare_while_idle()

    def _begin(self, plan: StepPlan) -> BegunStep:
        self._plan = plan
        return super()._begin(plan)

    def _forward(self, inputs: StepInputs, wants_all: bool) -> torch.Tensor:
        assert self._plan is not None, "a step is laid out once it is launched"
        step = self._name_drafts(self._plan)
        self._lay_out(inputs, step)
        hidden = super()._forward(inputs, wants_all)
        self._device_drafter.behind(step, self._taps)
        return hidden

    def _lay_out(self, inputs: StepInputs, step: DrafterStep) -> None:
        """The step's tokens are what the rank has made of the plan's."""
        inputs.batch.input_ids = step.ids

    def _name_drafts(self, plan: StepPlan) -> DrafterStep:
        """Before the target runs; what the plan changes in memory has been done. A step that is
        launched again has the drafts that it had."""
        self._clear_tokens(plan.cleared)
        step = DrafterStep(plan, self._sampling, self._req_to_token)
        self._make_drafts(step)
        return step

    def _make_drafts(self, step: DrafterStep) -> None:
        """And all else that the drafter does ahead of the target."""
        plan, runs = step.plan, step.runs
        if len(runs):
            drafts = self._mailbox.made(plan.step_id, runs.slots)
            if drafts is None:
                drafts = self._device_drafter.propose(step)
                self._mailbox.put(plan.step_id, runs.slots, self._mailbox.send(drafts))
            # Before anything else that may find no memory: who waits for a step's drafts is told.
            self._mailbox.end(plan.step_id)
            step.name(drafts)
        self._device_drafter.before(step)

    def _clear_tokens(self, cache_indices: IntArray) -> None:
        """Before who takes these places over writes there."""
        if len(cache_indices):
            self._placed.clear_tokens(*upload([cache_indices.astype(np.int64)], self._device))

    def _model_output(self, inputs: StepInputs, wants_all: bool) -> ModelOutput:
        output = super()._model_output(inputs, wants_all or self._drafter.taps_final_states)
        if not self._drafter.taps_final_states:
            self._taps = output.taps
            return output
        self._taps = (output.hidden,)
        if wants_all:
            return output
        return ModelOutput(output.hidden.index_select(0, inputs.state_indices))

    def _sample(self, begun: BegunStep) -> SampledTokens:
        inputs = begun.inputs
        if inputs.drafts is not None:
            sampled = inputs.state_indices[: len(inputs.sample_slots)]
            ids = inputs.batch.input_ids.index_select(0, sampled)
            inputs = replace(inputs, drafts=self._drafts_behind(inputs.drafts, ids))
        return super()._sample(replace(begun, inputs=inputs))

    def _drafts_behind(self, drafts: RunDrafts, ids: torch.Tensor) -> RunDrafts:
        """ids: int64 (num samples,), what the step's samples are drawn behind."""
        return DeviceRunDrafts.with_ids(drafts, ids)
