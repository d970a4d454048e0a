"""A rank that verifies drafts: ModelRunner with runs of several tokens a row."""

import torch

from workers.config import EngineConfig
from workers.errors import ConfigError
from workers.loading.weights import OnProgress
from workers.parallel.group import TPGroup
from workers.runner.model_runner import ModelRunner
from workers.runner.step_inputs import StepInputs
from workers.runner.step_pieces import ReadableStep
from workers.sampling.state import SampledTokens
from workers.scheduler.plan import StepPlan
from workers.speculation.ngram import NgramProposer
from workers.speculation.runs import HostRuns, SampledRuns, run_lens_of


class SpeculativeModelRunner(ModelRunner):
    """On CPU, where the host knows true lengths as soon as a step has run.

    Raises ConfigError, beside what ModelRunner raises, for models with states, which no wrong draft
    can be taken back from.
    """

    def __init__(
        self, config: EngineConfig, tp: TPGroup, device: torch.device, on_progress: OnProgress
    ) -> None:
        super().__init__(config, tp, device, on_progress)
        if self._model.state_entries:
            raise ConfigError(
                f"speculative={config.speculative!r} and {self.facts.architecture}: a recurrent "
                "state cannot forget a wrong draft"
            )
        num_slots, max_context_len = self._req_to_token.shape
        proposer = NgramProposer(num_slots, max_context_len, device)
        self._runs = HostRuns(num_slots, self._req_to_token, proposer)

    def _launch(self, plan: StepPlan) -> ReadableStep:
        return super()._launch(self._runs.exact(plan))

    def _take_samples(self, sampled: SampledTokens, inputs: StepInputs) -> SampledTokens:
        num_samples = inputs.num_samples
        behind = inputs.batch.input_ids.index_select(
            0, inputs.state_indices[: len(inputs.sample_slots)]
        )
        run_lens = run_lens_of(sampled.token_ids, behind, num_samples)
        self._runs.take_in(
            inputs.sample_slots, inputs.sample_positions, sampled.token_ids, run_lens, num_samples
        )
        ends = torch.from_numpy(num_samples).cumsum(0)
        last = ends - torch.from_numpy(num_samples) + run_lens - 1
        slots = inputs.sample_slots_device.index_select(0, last)
        self._sampling.remember(slots, sampled.token_ids.index_select(0, last))
        if int(num_samples.max()) == 1:
            return sampled
        return SampledRuns(
            sampled.token_ids, sampled.has_nan, sampled.logprobs, run_lens, num_samples
        )
