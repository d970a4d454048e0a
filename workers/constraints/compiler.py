"""From a grammar's text to a matcher, with llguidance and the tokenizer of one model."""

import logging
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from llguidance import LLExecutor, LLMatcher, LLTokenizer
from llguidance.numpy import (
    fill_next_token_bitmask_par,
    fill_next_token_bitmask_par_with_draft_tokens,
)

from workers.constraints.grammar_matcher import GrammarMatcher, short_reason
from workers.constraints.limits import parser_limits
from workers.constraints.masks import WORD_BITS, AskedMasks
from workers.constraints.matcher import MaskBits
from workers.constraints.templates import TemplateCache
from workers.constraints.vocabulary import read_vocabulary
from workers.errors import ErrorCode, RequestRejectedError

logger = logging.getLogger(__name__)

MAX_MASK_THREADS = 16
"""Half of a step's rows each have a thread then; more only wake."""


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
        self._reading = threading.Lock()
        self._lock = threading.Lock()
        self._templates = TemplateCache()
        self._executor = LLExecutor(num_mask_threads(len(os.sched_getaffinity(0))))

    def prepare(self) -> None:
        """What would hold everybody up at the first request. A tokenizer that cannot be used is
        logged: it is refused to requests with a grammar, and others need none."""
        try:
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
                raise TypeError(f"a {type(one).__name__} was not compiled here")
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
        tokenizer = self._vocabulary()
        with self._lock:
            known = self._templates.copy_or_begin(grammar)
        if known is not None:
            return known
        # Of a processor: threads that compile at once wait for one another.
        start_s = time.thread_time()
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=parser_limits())
        compile_s = time.thread_time() - start_s
        with self._lock:
            if not matcher.is_error():
                return self._templates.add(grammar, matcher, compile_s)
            self._templates.give_up(grammar)
        raise _refusal(matcher.get_error())

    def _vocabulary(self) -> LLTokenizer:
        with self._reading:
            if self._tokenizer is None:
                try:
                    self._tokenizer = read_vocabulary(
                        self._folder, self._vocab_size, self._eos_token_ids
                    )
                except (ValueError, OSError) as error:
                    raise _refusal(f"this model's tokenizer cannot be used: {error}") from error
            return self._tokenizer


def num_mask_threads(num_processors: int) -> int:
    """Of a machine of so many: two are left to the engine's thread and to whoever else is busy
    while masks are made, where there are more than two."""
    return max(min(MAX_MASK_THREADS, num_processors - 2), min(num_processors, 2))


def _refusal(reason: str) -> RequestRejectedError:
    return RequestRejectedError(
        ErrorCode.INVALID_REQUEST, f"the grammar cannot be used: {short_reason(reason)}", "grammar"
    )
