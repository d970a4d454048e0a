"""States of a model of transformers without memory: its code is watched as at a start, which tells
shapes and dtypes; what only values tell, a survey does not ask."""

from typing import Any

import torch
from transformers import PreTrainedModel

from attention.memory.slot_states import StateEntry, StateTensor
from workers.errors import ModelLoadError
from workers.loading.model_folder import text_config_of
from workers.models.transformers_attention import NoAttention
from workers.models.transformers_body import FlatBody
from workers.models.transformers_class import may_keep_states
from workers.models.transformers_experts import is_of_experts
from workers.models.transformers_parts import BodyAndHead
from workers.models.transformers_probing import probing
from workers.models.transformers_state_probe import FreshTokens
from workers.models.transformers_states import FlatCall, RowsCache, StateModule

_NUM_TOKENS = 2


class _ShapesKept(FreshTokens):
    """entries: by StateModule.index."""

    def __init__(self) -> None:
        super().__init__(_NUM_TOKENS)
        self.entries: dict[int, StateEntry] = {}

    def _learn(self, module: StateModule, call: FlatCall, cache: RowsCache) -> None:
        self.entries[module.index] = StateEntry(
            tuple(StateTensor(tuple(one.shape[1:]), one.dtype) for one in cache.kept().values())
        )


def states_on_meta(model: PreTrainedModel) -> tuple[StateEntry, ...] | None:
    """model: on the meta device; taken over. As CausalLM.state_entries, or None where its code
    looks at values before it shows what it keeps."""
    if model.config.is_encoder_decoder:
        return ()
    parts = BodyAndHead.of(model)
    config = text_config_of(parts.head.config)
    if not may_keep_states(config, type(parts.head)):
        return ()
    try:
        with probing("states do not show without weights"):
            return _entries(parts, config)
    except ModelLoadError:
        # Not the model's fault: a start, which has weights, may well see them.
        return None


def _tokens_as_they_are(hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return hidden_states


@torch.inference_mode()
def _entries(parts: BodyAndHead, config: Any) -> tuple[StateEntry, ...]:
    kept = _ShapesKept()
    for module in parts.body.modules():
        if is_of_experts(module):
            # Who is routed where is a question of values; what comes out is of the tokens' shape.
            module.forward = _tokens_as_they_are
    # What the model's code makes without saying where is to be of no device either.
    with torch.device("meta"):
        tokens = torch.zeros(_NUM_TOKENS, dtype=torch.int64)
        body = FlatBody(parts.body, config, keeps_states=True)
        modules = body.install_state_modules(tokens[:1], NoAttention())
        body.run(tokens, torch.zeros_like(tokens), NoAttention(), kept)
    return tuple(kept.entries[one.index] for one in modules)
