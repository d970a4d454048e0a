"""From a grammar's text to a matcher, with llguidance and the tokenizer of one model."""

import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from llguidance import LLExecutor, LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer
from llguidance.numpy import fill_next_token_bitmask_par
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from workers.constraints.limits import parser_limits
from workers.constraints.matcher import MaskBits, TokenMatcher
from workers.errors import ErrorCode, RequestRejectedError

MAX_CACHED_GRAMMARS = 256
MAX_MASK_THREADS = 8
"""Masks of a step take a few times as long as one; more threads than that only wake."""
MAX_CACHED_TEXT_BYTES = 1 << 20
"""Of all grammars that are kept: what is made of a byte took about 70."""
_MAX_REASON_CHARS = 300


class GrammarMatcher:
    """A TokenMatcher around an LLMatcher of its own."""

    def __init__(self, matcher: LLMatcher) -> None:
        self.matcher = matcher

    @property
    def failure(self) -> str:
        return _short(self.matcher.get_error()) if self.matcher.is_error() else ""

    @property
    def is_complete(self) -> bool:
        return self.matcher.is_stopped()

    def consume(self, token_id: int) -> None:
        self.matcher.consume_token(token_id)

    def take_forced(self, token_id: int) -> list[int]:
        """llguidance tokenizes the text that must follow, leaves out what a longer token might go
        beyond, and has each of these tokens alone in its mask; the tests hold it to that."""
        forced = self.matcher.compute_ff_tokens()
        if len(forced) < 2 or forced[0] != token_id:
            return []
        return forced if self.matcher.consume_tokens(forced) else []


class GrammarCompiler:
    """Reads the tokenizer at its first use and keeps what it compiled, by its text. compile is safe
    for threads; masks are filled by native ones of its own.

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
        self._executor = LLExecutor(min(MAX_MASK_THREADS, os.cpu_count() or 1))

    def compile(self, grammar: str, token_ids: Sequence[int]) -> GrammarMatcher:
        """A matcher that has gone past token_ids.

        Takes a millisecond as a rule, seconds at worst. Raises RequestRejectedError where the
        grammar cannot be compiled, or does not allow token_ids.
        """
        matcher = self._fresh(grammar)
        if token_ids and not matcher.consume_tokens(list(token_ids)):
            raise _refusal(f"the output so far does not obey it: {matcher.get_error()}")
        return GrammarMatcher(matcher)

    def fill(self, rows: Sequence[tuple[TokenMatcher, int]], bits: MaskBits) -> None:
        """Without the interpreter lock while it takes. rows: matchers of this compiler."""
        own = [(one.matcher, row) for one, row in rows if isinstance(one, GrammarMatcher)]
        if own:
            fill_next_token_bitmask_par(self._executor, own, bits)

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
