"""Which proposer a method stands for. Each is imported where it is asked for."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from workers.config import EngineConfig
from workers.models.base import CausalLM
from workers.parallel.group import TPGroup
from workers.speculation.config import Method, SpeculativeConfig
from workers.speculation.history import TokenHistory
from workers.speculation.proposer import Proposer


@dataclass(frozen=True, slots=True)
class ProposerContext:
    """What proposers are made of. model: the target."""

    speculation: SpeculativeConfig
    engine: EngineConfig
    tp: TPGroup
    device: torch.device
    history: TokenHistory
    model: CausalLM


def make_proposer(context: ProposerContext) -> Proposer:
    """Raises ConfigError where the method and the engine do not fit together."""
    return _BUILDERS[context.speculation.method](context)


def _ngram(context: ProposerContext) -> Proposer:
    from workers.speculation.ngram import NgramProposer

    return NgramProposer(context.history)


def _suffix(context: ProposerContext) -> Proposer:
    from workers.speculation.suffix import SuffixProposer

    return SuffixProposer(context.history)


_BUILDERS: dict[Method, Callable[[ProposerContext], Proposer]] = {
    "ngram": _ngram,
    "suffix": _suffix,
}
