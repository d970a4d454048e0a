"""A rank that verifies drafts: ModelRunner with runs of several tokens a row."""

import time
from dataclasses import replace

import numpy as np
import torch

from workers.config import EngineConfig
from workers.errors import ConfigError
from workers.loading.weights import OnProgress
from workers.models.base import CausalLM
from workers.parallel.group import TPGroup
from workers.runner.executor import StepExecutor, StepOutcome
from workers.runner.model_runner import ModelRunner
from workers.runner.naming_executor import NamedStep, NamingStepExecutor
from workers.runner.step_inputs import BegunStep, StepInputs
from workers.runner.step_pieces import ReadableStep
from workers.sampling.state import SampledTokens
from workers.scheduler.plan import StepPlan
from workers.speculation.chain import ChainVerifier
from workers.speculation.config import SpeculativeConfig
from workers.speculation.factory import make_proposer
from workers.speculation.history import TokenHistory
from workers.speculation.proposer import Moved, Proposer
from workers.speculation.runs import HostRuns, SampledRuns, observed_step, result_of_runs
from workers.speculation.tree import HeldPaths, TreeVerifier, in_order
from workers.speculation.verifier import Verifier


def check_forgets(config: EngineConfig, model: CausalLM, architecture: str) -> None:
    """Raises ConfigError for models with states, which no wrong draft can be taken back from."""
    if model.state_entries:
        raise ConfigError(
            f"speculative={config.speculative!r} and {architecture}: a recurrent state cannot "
            "forget a wrong draft"
        )


def check_branches(speculation: SpeculativeConfig, model: CausalLM, architecture: str) -> None:
    """Raises ConfigError where keys and values of a tree's path cannot be brought in line, or a
    draft's position is not its place among the tokens."""
    has_more = model.encoder is not None or model.media is not None
    layers = model.geometry.layers
    is_unlike = any(one.heads is not None or one.kv_layer_id is not None for one in layers)
    if has_more or is_unlike or model.geometry.latent is not None:
        raise ConfigError(
            f"draft_tree={list(speculation.tree)} and {architecture}: only models of text that "
            "keep keys and values of heads verify trees, alike in all layers; leave draft_tree out"
        )


class SpeculativeModelRunner(ModelRunner):
    """On CPU, where the host knows true lengths as soon as a step has run.

    Raises ConfigError, beside what ModelRunner raises, as check_forgets and check_branches do.
    """

    def __init__(
        self, config: EngineConfig, tp: TPGroup, device: torch.device, on_progress: OnProgress
    ) -> None:
        super().__init__(config, tp, device, on_progress)
        speculation = config.speculation
        if speculation is None:
            raise ConfigError("a runner of drafts needs to know who proposes them")
        check_forgets(config, self._model, self.facts.architecture)
        if speculation.tree:
            check_branches(speculation, self._model, self.facts.architecture)
        num_slots, max_context_len = self._req_to_token.shape
        history = TokenHistory(num_slots, max_context_len, device)
        self._proposer = self._make_proposer(speculation, history)
        self._verifier: Verifier = ChainVerifier()
        self._tree_verifier = TreeVerifier()
        self._runs = HostRuns(self._req_to_token, history, self._proposer)
        # The step being launched, or its piece, as it runs.
        self._plan: StepPlan | None = None

    def _make_proposer(self, speculation: SpeculativeConfig, history: TokenHistory) -> Proposer:
        return make_proposer(speculation.method, history, speculation.tree)

    def make_executor(self) -> StepExecutor:
        return NamingStepExecutor(self.name, self.run_named, self._masks)

    def name(self, plan: StepPlan) -> NamedStep:
        """Behind the step before."""
        started_s, has_runs = time.perf_counter(), plan.has_runs
        exact = self._runs.exact(plan)
        draft_s = time.perf_counter() - started_s if has_runs else 0.0
        return NamedStep(exact, has_runs, started_s, draft_s)

    def run_named(self, step: NamedStep) -> StepOutcome:
        outcome = super().run(step.plan)
        result = outcome.result
        if step.has_runs and not len(result.run_lens):
            ones = np.ones(len(result.token_ids), dtype=np.int32)
            result = result_of_runs(result, ones, ones)
        return replace(outcome, result=result, started_s=step.started_s, draft_s=step.draft_s)

    def run(self, plan: StepPlan) -> StepOutcome:
        return self.run_named(self.name(plan))

    def run_follower(self, plan: StepPlan) -> None:
        super().run_follower(self.name(plan).plan)

    def _launch(self, plan: StepPlan) -> ReadableStep:
        self._plan = plan
        return super()._launch(plan)

    def _sample(self, begun: BegunStep) -> SampledTokens:
        sampled = super()._sample(begun)
        if begun.logits is None:
            self._tell_proposer(sampled.token_ids, sampled.token_ids)
        return sampled

    def _take_samples(self, sampled: SampledTokens, inputs: StepInputs) -> SampledTokens:
        num_samples = inputs.num_samples
        behind = inputs.batch.input_ids.index_select(
            0, inputs.state_indices[: len(inputs.sample_slots)]
        )
        positions, moved = inputs.sample_positions, None
        if inputs.trees is None:
            run_lens = self._verifier.accept(sampled.token_ids, behind, num_samples)
        else:
            held = self._tree_verifier.accept(sampled.token_ids, behind, num_samples, inputs.trees)
            run_lens, sampled = held.run_lens, in_order(sampled, held.order)
            positions = inputs.trees.places + np.int32(1)
            moved = self._line_up(inputs, held)
        starts = np.cumsum(num_samples, dtype=np.int64) - num_samples
        own = sampled.token_ids.numpy(), run_lens.numpy(), starts
        self._runs.take_in(inputs.sample_slots, positions, *own)
        ends = torch.from_numpy(num_samples).cumsum(0)
        last = ends - torch.from_numpy(num_samples) + run_lens - 1
        slots = inputs.sample_slots_device.index_select(0, last)
        next_ids = sampled.token_ids.index_select(0, last)
        self._sampling.remember(slots, next_ids)
        self._tell_proposer(run_lens, next_ids, moved)
        if inputs.drafts is None:
            return sampled
        return SampledRuns(
            sampled.token_ids, sampled.has_nan, sampled.logprobs, run_lens, num_samples
        )

    def _line_up(self, inputs: StepInputs, held: HeldPaths) -> Moved:
        """Keys and values of each row's path come to stand where a chain's would."""
        targets = inputs.batch.out_cache_loc
        moved = Moved(held.order, targets[held.order], targets)
        self._backend.token_to_kv_pool.move_tokens(moved.sources, moved.targets)
        return moved

    def _tell_proposer(
        self, run_lens: torch.Tensor, next_ids: torch.Tensor, moved: Moved | None = None
    ) -> None:
        """run_lens, next_ids: int64 (num sampling rows,)."""
        assert self._plan is not None, "a step is observed once it is launched"
        self._proposer.observe(observed_step(self._plan, run_lens, next_ids, moved))
