"""A rank that verifies drafts: ModelRunner with runs of several tokens a row."""

import numpy as np
import torch

from workers.config import EngineConfig
from workers.errors import ConfigError
from workers.loading.weights import OnProgress
from workers.models.token_inputs import ModelOutput, TokenInputs
from workers.parallel.group import TPGroup
from workers.runner.model_runner import ModelRunner
from workers.runner.step_inputs import BegunStep, StepInputs
from workers.runner.step_pieces import ReadableStep
from workers.sampling.state import SampledTokens
from workers.scheduler.plan import StepPlan
from workers.speculation.chain import ChainVerifier
from workers.speculation.config import SpeculativeConfig
from workers.speculation.factory import ProposerContext, make_proposer
from workers.speculation.history import TokenHistory
from workers.speculation.proposer import ObservedStep, Proposer
from workers.speculation.runs import HostRuns, SampledRuns
from workers.speculation.verifier import Verifier


class SpeculativeModelRunner(ModelRunner):
    """On CPU, where the host knows true lengths as soon as a step has run.

    Raises ConfigError, beside what ModelRunner raises, for models with states, which no wrong draft
    can be taken back from, and where the proposer does not fit.
    """

    def __init__(
        self, config: EngineConfig, tp: TPGroup, device: torch.device, on_progress: OnProgress
    ) -> None:
        super().__init__(config, tp, device, on_progress)
        speculation = config.speculation
        if speculation is None:
            raise ConfigError("a runner of drafts needs to know who proposes them")
        if self._model.state_entries:
            raise ConfigError(
                f"speculative={config.speculative!r} and {self.facts.architecture}: a recurrent "
                "state cannot forget a wrong draft"
            )
        num_slots, max_context_len = self._req_to_token.shape
        history = TokenHistory(num_slots, max_context_len, device)
        self._proposer = self._make_proposer(config, speculation, tp, history)
        self._verifier: Verifier = ChainVerifier()
        self._runs = HostRuns(self._req_to_token, history, self._proposer)
        # Of the step being launched: its plan as it came and as it runs, and what its pass gave.
        self._planned_runs = False
        self._plan: StepPlan | None = None
        self._output: ModelOutput | None = None

    def _make_proposer(
        self,
        config: EngineConfig,
        speculation: SpeculativeConfig,
        tp: TPGroup,
        history: TokenHistory,
    ) -> Proposer:
        proposer = make_proposer(
            ProposerContext(speculation, config, tp, self._device, history, self._model)
        )
        if proposer.needs.tap_layers:
            self._model.tap_layers(proposer.needs.tap_layers)
        return proposer

    def _launch(self, plan: StepPlan) -> ReadableStep:
        self._planned_runs = plan.has_runs
        self._plan = self._runs.exact(plan)
        return super()._launch(self._plan)

    def _final_states(self, inputs: StepInputs, wants_all: bool) -> torch.Tensor:
        tokens = TokenInputs(inputs.batch.input_ids, inputs.positions, inputs.embeddings)
        needs_all = self._proposer.needs.states
        if wants_all or needs_all:
            self._output = self._model(tokens, inputs.batch)
        else:
            self._output = self._model.forward_rows(tokens, inputs.batch, inputs.state_indices)
        hidden = self._output.hidden
        return hidden.index_select(0, inputs.state_indices) if needs_all > wants_all else hidden

    def _sample(self, begun: BegunStep) -> SampledTokens:
        sampled = super()._sample(begun)
        if begun.logits is None:
            self._tell_proposer(begun.inputs, sampled.token_ids, sampled.token_ids)
        return sampled

    def _take_samples(self, sampled: SampledTokens, inputs: StepInputs) -> SampledTokens:
        num_samples = inputs.num_samples
        behind = inputs.batch.input_ids.index_select(
            0, inputs.state_indices[: len(inputs.sample_slots)]
        )
        run_lens = self._verifier.accept(sampled.token_ids, behind, num_samples).run_lens
        self._runs.take_in(
            inputs.sample_slots, inputs.sample_positions, sampled.token_ids, run_lens, num_samples
        )
        ends = torch.from_numpy(num_samples).cumsum(0)
        last = ends - torch.from_numpy(num_samples) + run_lens - 1
        slots = inputs.sample_slots_device.index_select(0, last)
        next_ids = sampled.token_ids.index_select(0, last)
        self._sampling.remember(slots, next_ids)
        self._tell_proposer(inputs, run_lens, next_ids)
        if not self._planned_runs:
            return sampled
        return SampledRuns(
            sampled.token_ids, sampled.has_nan, sampled.logprobs, run_lens, num_samples
        )

    def _tell_proposer(
        self, inputs: StepInputs, run_lens: torch.Tensor, next_ids: torch.Tensor
    ) -> None:
        """run_lens, next_ids: int64 (num sampling rows,)."""
        plan, output = self._plan, self._output
        assert plan is not None, "a step is observed once it is launched"
        assert output is not None, "a step is observed once it has run"
        self._output = None
        samples = torch.from_numpy(plan.samples.astype(np.int64))
        num_held = torch.from_numpy(plan.num_new_tokens.astype(np.int64)) - samples
        all_next_ids = torch.full_like(num_held, -1)
        num_held[samples > 0] += run_lens
        all_next_ids[samples > 0] = next_ids
        needs = self._proposer.needs
        self._proposer.observe(
            ObservedStep(
                inputs.batch,
                inputs.batch.input_ids,
                num_held,
                all_next_ids,
                output.hidden if needs.states else None,
                output.taps if needs.tap_layers else (),
            )
        )
