"""A rank whose drafts come from a smaller model beside its own."""

from dataclasses import replace

import torch

from workers.config import EngineConfig
from workers.errors import ConfigError
from workers.loading.loader import LoadedModel
from workers.loading.weights import OnProgress
from workers.parallel.group import TPGroup
from workers.runner.draft_model import DraftModel, PlacedModel, kv_bytes_a_token
from workers.runner.naming_executor import NamedStep
from workers.runner.sizing import AttentionPlan
from workers.runner.speculative_runner import SpeculativeModelRunner
from workers.scheduler.plan import StepPlan
from workers.speculation.config import SpeculativeConfig
from workers.speculation.draft import DraftModelProposer
from workers.speculation.history import TokenHistory
from workers.speculation.proposer import Proposer


class DraftModelRunner(SpeculativeModelRunner):
    """On CPU. Raises as SpeculativeModelRunner and DraftModel do."""

    _draft: DraftModel
    _placed: PlacedModel

    def _plan_attention(
        self, config: EngineConfig, loaded: LoadedModel, tp: TPGroup, on_progress: OnProgress
    ) -> AttentionPlan:
        """A token takes both models' bytes of what is there for KV memory."""
        speculation = config.speculation
        if speculation is None or speculation.model is None:
            raise ConfigError("a runner of a draft model needs to know its model")
        self._draft = DraftModel(config, speculation.model, loaded, tp, on_progress)
        own = kv_bytes_a_token(config, loaded)
        left_bytes = config.kv_cache_bytes * own // (own + self._draft.num_bytes_a_token())
        return super()._plan_attention(
            replace(config, kv_cache_bytes=left_bytes), loaded, tp, on_progress
        )

    def _make_proposer(self, speculation: SpeculativeConfig, history: TokenHistory) -> Proposer:
        backend = self._backend
        self._placed = self._draft.place(backend.config, self.num_pages, backend.req_to_token_pool)
        placed = self._placed
        return DraftModelProposer(history, placed.model, placed.backend, self._req_to_token)

    def name(self, plan: StepPlan) -> NamedStep:
        if len(plan.cleared):
            # Before who takes these places over writes there.
            self._placed.pool.clear_tokens(torch.from_numpy(plan.cleared.astype("int64")))
        return super().name(plan)
