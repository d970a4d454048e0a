"""From a grammar's text to a matcher, with llguidance and the tokenizer of one model."""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer
from llguidance.numpy import fill_next_token_bitmask
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from workers.constraints.limits import parser_limits
from workers.constraints.matcher import MaskBits
from workers.errors import ErrorCode, RequestRejectedError

MAX_CACHED_GRAMMARS = 256
MAX_CACHED_TEXT_BYTES = 1 << 20
"""Of all grammars that are kept: what is made of a byte took about 70."""
_MAX_REASON_CHARS = 300


class GrammarMatcher:
    """A TokenMatcher around an LLMatcher of its own."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    @property
    def failure(self) -> str:
        return _short(self._matcher.get_error()) if self._matcher.is_error() else ""

    @property
    def is_complete(self) -> bool:
        return self._matcher.is_stopped()

    def consume(self, token_id: int) -> None:
        self._matcher.consume_token(token_id)

    def fill(self, bits: MaskBits, row: int) -> None:
        fill_next_token_bitmask(self._matcher, bits, row)


class GrammarCompiler:
    """Thread-safe. Reads the tokenizer at its first use and keeps what it compiled, by its text.

    folder: the model's, with a tokenizer.json. vocab_size: tokens that the model's head has.
    eos_token_ids: what may follow a complete text; at least one.
    """

    def __init__(self, folder: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._folder = folder
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._tokenizer: LLTokenizer | None = None
        self._lock = threading.Lock()
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()

    def compile(self, grammar: str, token_ids: Sequence[int]) -> GrammarMatcher:
        """A matcher that has gone past token_ids.

        Takes a millisecond as a rule, seconds at worst. Raises RequestRejectedError where the
        grammar cannot be compiled, or does not allow token_ids.
        """
        matcher = self._fresh(grammar)
        if token_ids and not matcher.consume_tokens(list(token_ids)):
            raise _refusal(f"the output so far does not obey it: {matcher.get_error()}")
        return GrammarMatcher(matcher)

    def _fresh(self, grammar: str) -> LLMatcher:
        with self._lock:
            known = self._compiled.get(grammar)
            if known is not None:
                self._compiled.move_to_end(grammar)
                return known.deep_copy()
            tokenizer = self._tokenizer = self._tokenizer or self._read_tokenizer()
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=parser_limits())
        if matcher.is_error():
            raise _refusal(matcher.get_error())
        with self._lock:
            self._compiled[grammar] = matcher
            while len(self._compiled) > MAX_CACHED_GRAMMARS or self._is_full():
                self._compiled.popitem(last=False)
            return matcher.deep_copy()

    def _is_full(self) -> bool:
        return sum(map(len, self._compiled)) > MAX_CACHED_TEXT_BYTES

    def _read_tokenizer(self) -> LLTokenizer:
        try:
            tokenizer = AutoTokenizer.from_pretrained(self._folder)
            if not isinstance(tokenizer, PreTrainedTokenizerFast):
                raise ValueError(f"{type(tokenizer).__name__} is not one of the tokenizers library")
            return from_tokenizer(tokenizer, self._vocab_size, self._eos_token_ids)
        except (ValueError, OSError) as error:
            raise _refusal(f"this model's tokenizer cannot be used for that: {error}") from error


def _refusal(reason: str) -> RequestRejectedError:
    return RequestRejectedError(
        ErrorCode.INVALID_REQUEST, f"the grammar cannot be used: {_short(reason)}", "grammar"
    )


def _short(reason: str) -> str:
    """Without the parser's state, which follows in angle brackets; never empty."""
    return reason.partition("<state>")[0].strip()[:_MAX_REASON_CHARS] or "unknown"
