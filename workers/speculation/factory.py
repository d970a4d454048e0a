"""Which proposer a method stands for. Each is imported where it is asked for."""

from collections.abc import Callable

from workers.speculation.config import Method
from workers.speculation.history import TokenHistory
from workers.speculation.proposer import Proposer


def make_proposer(method: Method, history: TokenHistory) -> Proposer:
    return _BUILDERS[method](history)


def _ngram(history: TokenHistory) -> Proposer:
    from workers.speculation.ngram import NgramProposer

    return NgramProposer(history)


def _suffix(history: TokenHistory) -> Proposer:
    from workers.speculation.suffix import SuffixProposer

    return SuffixProposer(history)


_BUILDERS: dict[Method, Callable[[TokenHistory], Proposer]] = {
    "ngram": _ngram,
    "suffix": _suffix,
}
