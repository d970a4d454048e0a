"""A rank whose drafts come from a model or a head beside its own."""

import msgspec
import torch

from workers.config import EngineConfig
from workers.kv_cache.radix_node import EMPTY
from workers.loading.loader import LoadedModel
from workers.loading.weights import OnProgress
from workers.models.token_inputs import ModelOutput
from workers.parallel.group import TPGroup
from workers.runner.drafter_loading import load_drafter
from workers.runner.naming_executor import NamedStep
from workers.runner.paged_drafter import PagedDrafter, PlacedDrafter
from workers.runner.sizing import AttentionPlan, plan_attention
from workers.runner.speculative_runner import SpeculativeModelRunner
from workers.runner.step_inputs import StepInputs
from workers.scheduler.plan import StepPlan
from workers.speculation.config import SpeculativeConfig
from workers.speculation.history import TokenHistory
from workers.speculation.proposer import Proposer
from workers.speculation.taps import StepTaps


class PagedDrafterRunner(SpeculativeModelRunner):
    """On CPU. Raises as SpeculativeModelRunner and load_drafter do."""

    _drafter: PagedDrafter
    _placed: PlacedDrafter

    def _plan_attention(
        self, config: EngineConfig, loaded: LoadedModel, tp: TPGroup, on_progress: OnProgress
    ) -> AttentionPlan:
        """A token takes both models' bytes of what is there for KV memory."""
        self._drafter = load_drafter(config, loaded, tp, on_progress)
        return plan_attention(
            config, loaded, self.num_padding_slots, tp, self._drafter.num_bytes_a_token()
        )

    def _make_proposer(self, speculation: SpeculativeConfig, history: TokenHistory) -> Proposer:
        backend = self._backend
        self._taps = StepTaps()
        self._placed = self._drafter.place(
            backend.config, self.num_pages, backend.req_to_token_pool
        )
        return self._placed.proposer(history, self._taps)

    def _model_output(self, inputs: StepInputs, wants_all: bool) -> ModelOutput:
        taps_final = self._drafter.taps_final_states
        output = super()._model_output(inputs, wants_all or taps_final)
        num_new = inputs.batch.extend_seq_lens_cpu
        self._taps.put((output.hidden,) if taps_final else output.taps, num_new)
        if taps_final and not wants_all:
            return ModelOutput(output.hidden.index_select(0, inputs.state_indices))
        return output

    def name(self, plan: StepPlan) -> NamedStep:
        """Memory changes first: a page that a running row gave up, as another has the same tokens,
        may be where its drafts are written."""
        self._inputs.apply_memory_writes(plan)
        if len(plan.cleared):
            # Before who takes these places over writes there.
            self._placed.clear_tokens(torch.from_numpy(plan.cleared.astype("int64")))
        return super().name(
            msgspec.structs.replace(plan, cleared=EMPTY, bounded_cleared=(), table_writes=())
        )
