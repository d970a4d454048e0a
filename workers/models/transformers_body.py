"""A model's body, called for one flat sequence of a step's tokens. Knows no head and no weights."""

import copy
import inspect
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from workers.errors import ModelLoadError
from workers.models.token_inputs import PlacedEmbeddings
from workers.models.transformers_attention import CALL_ARGUMENT, AttentionCall, CallInPlace
from workers.models.transformers_cache_name import cache_name
from workers.models.transformers_state_probe import install_state_modules
from workers.models.transformers_states import SlotCache, StateCall, StateModule

_PADDING_CHECK = "warn_if_padding_and_no_attention_mask"


class FlatBody:
    """Passes what attention and modules with a state need for a step down to them.

    config: of the text. A body that keeps no states gets no cache.
    """

    def __init__(self, body: nn.Module, config: PreTrainedConfig, keeps_states: bool) -> None:
        self._body = body
        self._config = config
        parameters = inspect.signature(body.forward).parameters
        self._takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        self._names = frozenset(parameters)
        self._in_place = CallInPlace()
        self._in_place.put_into(body)
        _take_padding_checks_from(body)
        self._cache_name = _cache_name(body) if keeps_states else ""
        self._cache = SlotCache(config) if keeps_states else None

    def install_state_modules(
        self, token: torch.Tensor, attention_call: AttentionCall
    ) -> list[StateModule]:
        """Let modules that keep a state run as StateModules from here on. token: int64 (1,)."""
        if self._cache is None:
            return []
        tokens, zero = {"input_ids": token.unsqueeze(0)}, torch.zeros_like(token)
        return install_state_modules(
            self._body,
            self._config,
            lambda cache: self._run(tokens, zero, attention_call, cache),
        )

    def run(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor | None,
        attention_call: AttentionCall,
        state_call: StateCall,
        embeddings: PlacedEmbeddings | None = None,
    ) -> torch.Tensor:
        """input_ids int64 (n,), positions int64 (n,) or (3, n) -> final states (n, hidden).
        positions None: the body counts them. embeddings: in place of those of input_ids."""
        cache = copy.copy(self._cache)
        if cache is not None:
            cache.state_call = state_call
        tokens: dict[str, Any] = {"input_ids": input_ids.unsqueeze(0)}
        if embeddings is not None:
            tokens = {"inputs_embeds": self._embedded(input_ids, embeddings).unsqueeze(0)}
        return self._run(tokens, positions, attention_call, cache)

    def _embedded(self, input_ids: torch.Tensor, placed: PlacedEmbeddings) -> torch.Tensor:
        """As the body embeds them, (n, hidden), but for those that are given."""
        body: Any = self._body
        own: torch.Tensor = body.get_input_embeddings()(input_ids)
        return own.index_copy(0, placed.places, placed.states)

    def _run(
        self,
        tokens: dict[str, Any],
        positions: torch.Tensor | None,
        attention_call: AttentionCall,
        cache: SlotCache | None,
    ) -> torch.Tensor:
        given: dict[str, Any] = {"use_cache": False, CALL_ARGUMENT: attention_call}
        if positions is not None:
            given["position_ids"] = positions.unsqueeze(-2)
        if cache is not None:
            given = {name: value for name, value in given.items() if self._takes(name)}
            given[self._cache_name] = cache
        with self._in_place.during(attention_call):
            outputs = self._body(**tokens, **given)
        hidden: torch.Tensor = outputs.last_hidden_state.squeeze(0)
        return hidden

    def _takes(self, name: str) -> bool:
        """Bodies whose layers all keep states have neither positions nor attention."""
        return self._takes_all or name in self._names


def _take_padding_checks_from(body: nn.Module) -> None:
    """A flat batch has no padding to warn of, and looking for it waits for the device."""
    for module in body.modules():
        if isinstance(module, PreTrainedModel):
            setattr(module, _PADDING_CHECK, lambda input_ids, attention_mask: None)


def _cache_name(body: nn.Module) -> str:
    name = cache_name(body.forward)
    if name is None:
        raise ModelLoadError(f"{type(body).__name__} keeps recurrent state outside of its cache")
    return name
