"""From a grammar's text to a matcher, with llguidance and the tokenizer of one model."""

import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer
from llguidance.numpy import (
    fill_next_token_bitmask,
    fill_next_token_bitmask_par,
    fill_next_token_bitmask_par_with_draft_tokens,
)

from workers.constraints.limits import parser_limits
from workers.constraints.masks import WORD_BITS, AskedMasks
from workers.constraints.matcher import MaskBits
from workers.constraints.vocabulary import read_vocabulary
from workers.errors import ErrorCode, RequestRejectedError

logger = logging.getLogger(__name__)

MAX_CACHED_GRAMMARS = 256
MAX_MASK_THREADS = 8
"""Masks of a step take a few times as long as one; more threads than that only wake."""
NUM_TEMPLATES = 8
"""Of a grammar that many requests have: as many of its masks are made at once."""
MAX_CACHED_TEXT_BYTES = 1 << 20
"""Of all grammars that are kept: what is made of a byte took about 70."""
_MAX_REASON_CHARS = 300


class GrammarMatcher:
    """A TokenMatcher around an LLMatcher of its own. template: the number of the one that it is a
    copy of, among those of its grammar. next_mask: what may follow, where that is known already,
    int32 (num words,). failure and is_complete are of when the matcher was last let go of: while
    another thread makes a mask, nobody may ask it."""

    def __init__(self, matcher: LLMatcher, template: int = 0) -> None:
        self.matcher = matcher
        self.template = template
        self.next_mask: MaskBits | None = None
        self.failure = ""
        self.is_complete = False
        self.look()

    def look(self) -> None:
        """Find out how it stands."""
        matcher = self.matcher
        self.is_complete = matcher.is_stopped()
        self.failure = _short(matcher.get_error()) if matcher.is_error() else ""

    def make_next_mask(self, num_words: int) -> None:
        bits = np.zeros((1, num_words), dtype=np.int32)
        fill_next_token_bitmask(self.matcher, bits)
        self.next_mask = bits[0]
        self.look()

    def consume(self, token_id: int) -> None:
        self.next_mask = None
        self.matcher.consume_token(token_id)
        self.look()

    def take_forced(self, token_id: int) -> list[int]:
        """llguidance tokenizes the text that must follow, leaves out what a longer token might go
        beyond, and has each of these tokens alone in its mask; the tests hold it to that."""
        forced = self.matcher.compute_ff_tokens()
        if len(forced) < 2 or forced[0] != token_id:
            return []
        self.next_mask = None
        is_taken = self.matcher.consume_tokens(forced)
        self.look()
        return forced if is_taken else []


@dataclass(slots=True)
class _Templates:
    """Of one grammar, never gone past a token. Copies share what llguidance has learned of the
    grammar and the lock around it, so that their masks take turns however many threads there are:
    requests are spread over several."""

    matchers: list[LLMatcher] = field(default_factory=list)
    num_copies: int = 0

    def add(self, matcher: LLMatcher) -> GrammarMatcher:
        self.matchers.append(matcher)
        return GrammarMatcher(matcher.deep_copy(), len(self.matchers) - 1)

    def copy(self) -> GrammarMatcher:
        """Of each in turn."""
        self.num_copies += 1
        template = self.num_copies % len(self.matchers)
        return GrammarMatcher(self.matchers[template].deep_copy(), template)


class GrammarCompiler:
    """Reads the tokenizer at its first use, which prepare is, and keeps what it compiled, by its
    text. Both are safe for threads; masks are filled by native ones of its own.

    folder: the model's, with a tokenizer.json. vocab_size: tokens that the model's head has.
    eos_token_ids: what may follow a complete text; at least one.
    """

    def __init__(self, folder: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._folder = folder
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._tokenizer: LLTokenizer | None = None
        self._lock = threading.Lock()
        self._compiled: OrderedDict[str, _Templates] = OrderedDict()
        self._executor = LLExecutor(min(MAX_MASK_THREADS, os.cpu_count() or 1))

    def prepare(self) -> None:
        """What would hold everybody up at the first request. A tokenizer that cannot be used is
        logged: it is refused to requests with a grammar, and others need none."""
        try:
            with self._lock:
                self._vocabulary()
        except RequestRejectedError as error:
            logger.warning("requests with a grammar will be refused: %s", error)

    def compile(self, grammar: str, token_ids: Sequence[int]) -> GrammarMatcher:
        """A matcher that has gone past token_ids and knows what may follow: no step waits for what
        llguidance finds out about a grammar at its first mask.

        Takes a millisecond as a rule, seconds at worst. Raises RequestRejectedError where the
        grammar cannot be compiled, or does not allow token_ids.
        """
        fresh = self._fresh(grammar)
        if token_ids and not fresh.matcher.consume_tokens(list(token_ids)):
            raise _refusal(f"the output so far does not obey it: {fresh.matcher.get_error()}")
        fresh.make_next_mask(-(-self._vocab_size // WORD_BITS))
        return fresh

    def fill(self, rows: Sequence[AskedMasks], bits: MaskBits) -> None:
        """Without the interpreter lock while it takes. rows: matchers of this compiler."""
        own, drafted = [], []
        for asked in rows:
            one = asked.matcher
            if not isinstance(one, GrammarMatcher):
                continue
            if asked.drafts:
                drafted.append((one, asked))
            elif one.next_mask is None:
                own.append((one, asked))
            else:
                bits[asked.row] = one.next_mask
        # Threads take runs of neighbours: those of one template would wait for each other anyway.
        own.sort(key=lambda pair: pair[0].template)
        drafted.sort(key=lambda pair: pair[0].template)
        if own:
            alone = [(one.matcher, asked.row) for one, asked in own]
            fill_next_token_bitmask_par(self._executor, alone, bits)
        if drafted:
            fill_next_token_bitmask_par_with_draft_tokens(
                self._executor,
                [(one.matcher, asked.row, list(asked.drafts)) for one, asked in drafted],
                bits,
            )
        for one, _ in own + drafted:
            one.look()

    def _fresh(self, grammar: str) -> GrammarMatcher:
        with self._lock:
            known = self._compiled.get(grammar)
            if known is not None:
                self._compiled.move_to_end(grammar)
                if len(known.matchers) >= NUM_TEMPLATES:
                    return known.copy()
            tokenizer = self._vocabulary()
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=parser_limits())
        if matcher.is_error():
            raise _refusal(matcher.get_error())
        with self._lock:
            fresh = self._compiled.setdefault(grammar, _Templates()).add(matcher)
            while len(self._compiled) > MAX_CACHED_GRAMMARS or self._is_full():
                self._compiled.popitem(last=False)
            return fresh

    def _is_full(self) -> bool:
        sizes = (len(text) * len(known.matchers) for text, known in self._compiled.items())
        return sum(sizes) > MAX_CACHED_TEXT_BYTES

    def _vocabulary(self) -> LLTokenizer:
        if self._tokenizer is None:
            try:
                self._tokenizer = read_vocabulary(
                    self._folder, self._vocab_size, self._eos_token_ids
                )
            except (ValueError, OSError) as error:
                raise _refusal(f"this model's tokenizer cannot be used: {error}") from error
        return self._tokenizer


def _refusal(reason: str) -> RequestRejectedError:
    return RequestRejectedError(
        ErrorCode.INVALID_REQUEST, f"the grammar cannot be used: {_short(reason)}", "grammar"
    )


def _short(reason: str) -> str:
    """Without the parser's state, which follows in angle brackets; never empty."""
    return reason.partition("<state>")[0].strip()[:_MAX_REASON_CHARS] or "unknown"
