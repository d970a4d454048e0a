"""Which proposer a method stands for. Each is imported where it is asked for."""

from collections.abc import Callable

from workers.errors import ConfigError
from workers.speculation.config import Method
from workers.speculation.history import TokenHistory
from workers.speculation.proposer import Proposer


def make_proposer(method: Method, history: TokenHistory, tree: tuple[int, ...] = ()) -> Proposer:
    """Of those that look tokens up. tree: as in SpeculativeConfig. Raises ConfigError for one that
    runs a model."""
    if method not in _BUILDERS:
        raise ConfigError(f"speculative {method!r} takes a runner with a model of its own")
    return _BUILDERS[method](history, tree)


def _ngram(history: TokenHistory, tree: tuple[int, ...]) -> Proposer:
    from workers.speculation.ngram import NgramProposer

    return NgramProposer(history)


def _suffix(history: TokenHistory, tree: tuple[int, ...]) -> Proposer:
    from workers.speculation.suffix import SuffixProposer

    return SuffixProposer(history, tree)


_BUILDERS: dict[Method, Callable[[TokenHistory, tuple[int, ...]], Proposer]] = {
    "ngram": _ngram,
    "suffix": _suffix,
}
