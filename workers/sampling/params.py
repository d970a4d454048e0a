"""Sampling parameters of one request, validated once, immutable, and safe to cross a socket.

Knows no tensors, no tokenizer and no stop strings: text is the service's business.
"""

import math
from collections.abc import Iterable

import msgspec

from workers.errors import ErrorCode, RequestRejectedError

MAX_LOGPROBS = 256
MAX_LOGIT_BIAS_ENTRIES = 300
MAX_STOP_TOKEN_IDS = 128
MAX_ALLOWED_TOKEN_IDS = 1 << 16
MAX_BAD_WORDS = 256
MAX_BAD_WORD_TOKENS = 32
MAX_LOGPROB_TOKEN_IDS = 128
MAX_SEED = 2**63 - 1


class SamplingParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How the next token of a request is chosen. Meanings are those of OpenAI's API and of vLLM.

    temperature: 0 is greedy. top_k: 0 or -1 disables. top_p in (0, 1]. min_p in [0, 1].
    repetition_penalty > 0 covers prompt and output; presence and frequency penalties cover the
    output only, in [-2, 2]. logit_bias: token id to additive bias in [-100, 100].
    seed: decides the noise alone, which is a function of seed, absolute position and token id: the
    same seed draws the same noise whatever shares the batch. Tokens are the same as far as the
    logits are, whose last bits may depend on the shapes that a step's kernels see: on the batch, on
    chunks, on a cached prefix. Greedy rows feel that, too, where two tokens are nearly as likely.
    None draws a seed at submission.
    max_tokens: output tokens, None means up to the context's end. min_tokens: end-of-sequence and
    stop ids are masked until that many output tokens exist; an ignored end of sequence is not.
    logprobs: number of top alternatives per output token, None for no logprobs at all, 0 for the
    sampled token's only; prompt_logprobs: the same for prompt tokens. Log probabilities are those
    of the raw logits. logprob_token_ids: instead of the likeliest alternatives those of these
    tokens, in this order; only with logprobs. allowed_token_ids: no other token is sampled; empty:
    any is. bad_words: sequences of tokens that the output does not have: the last one of each is
    not sampled behind the others.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    @property
    def depends_on_output(self) -> bool:
        """Whether what a token may be depends on the ones before it."""
        return self.has_penalties or bool(self.bad_words)

    def validate(self, vocab_size: int) -> None:
        """Raise RequestRejectedError naming the first field that is out of range."""
        self._validate_ranges()
        self._validate_token_ids(vocab_size)
        self._validate_rules(vocab_size)

    def _validate_ranges(self) -> None:
        checks = (
            ("temperature", self.temperature, 0.0, 2.0),
            ("min_p", self.min_p, 0.0, 1.0),
            ("repetition_penalty", self.repetition_penalty, 1e-3, 1e3),
            ("presence_penalty", self.presence_penalty, -2.0, 2.0),
            ("frequency_penalty", self.frequency_penalty, -2.0, 2.0),
            ("top_k", self.top_k, -1, 2**31 - 1),
            ("min_tokens", self.min_tokens, 0, 2**31 - 1),
        )
        for name, value, low, high in checks:
            _check(math.isfinite(value) and low <= value <= high, name, f"in [{low}, {high}]")
        _check(0.0 < self.top_p <= 1.0, "top_p", "above 0 and at most 1")
        for name, count in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            _check(count is None or 0 <= count <= MAX_LOGPROBS, name, f"in [0, {MAX_LOGPROBS}]")
        if self.max_tokens is not None:
            _check(self.max_tokens >= 1, "max_tokens", "at least 1")
            _check(self.min_tokens <= self.max_tokens, "min_tokens", "at most max_tokens")
        _check(self.seed is None or -MAX_SEED <= self.seed <= MAX_SEED, "seed", "a 64-bit integer")

    def _validate_token_ids(self, vocab_size: int) -> None:
        _check(
            len(self.logit_bias) <= MAX_LOGIT_BIAS_ENTRIES,
            "logit_bias",
            f"at most {MAX_LOGIT_BIAS_ENTRIES} entries",
        )
        _check(
            len(self.stop_token_ids) <= MAX_STOP_TOKEN_IDS,
            "stop_token_ids",
            f"at most {MAX_STOP_TOKEN_IDS} entries",
        )
        for token_id, bias in self.logit_bias.items():
            _check(0 <= token_id < vocab_size, "logit_bias", f"token ids below {vocab_size}")
            _check(math.isfinite(bias) and abs(bias) <= 100, "logit_bias", "values in [-100, 100]")
        for token_id in self.stop_token_ids:
            _check(0 <= token_id < vocab_size, "stop_token_ids", f"token ids below {vocab_size}")

    def _validate_rules(self, vocab_size: int) -> None:
        for name, ids, most in (
            ("allowed_token_ids", self.allowed_token_ids, MAX_ALLOWED_TOKEN_IDS),
            ("logprob_token_ids", self.logprob_token_ids, MAX_LOGPROB_TOKEN_IDS),
        ):
            _check(len(ids) <= most, name, f"at most {most} entries")
            is_known = not ids or (min(ids) >= 0 and max(ids) < vocab_size)
            _check(is_known, name, f"token ids below {vocab_size}")
        _check(len(self.bad_words) <= MAX_BAD_WORDS, "bad_words", f"at most {MAX_BAD_WORDS} words")
        for word in self.bad_words:
            _check(
                1 <= len(word) <= MAX_BAD_WORD_TOKENS and min(word) >= 0 and max(word) < vocab_size,
                "bad_words",
                f"words of 1 to {MAX_BAD_WORD_TOKENS} tokens below {vocab_size}",
            )
        _check(
            not self.logprob_token_ids or self.logprobs is not None,
            "logprob_token_ids",
            "with logprobs only",
        )

    def check_something_is_left(self, vocab_size: int, ending_ids: Iterable[int]) -> None:
        """Raise RequestRejectedError if at some point no token at all might be sampled.

        ending_ids: what ends the request, and is masked before min_tokens.
        """
        if not (self.bad_words or self.allowed_token_ids):
            return
        never = {word[-1] for word in self.bad_words}
        if self.min_tokens:
            never.update(ending_ids)
        if self.allowed_token_ids:
            is_left = any(token_id not in never for token_id in self.allowed_token_ids)
        else:
            is_left = len(never) < vocab_size
        _check(
            is_left,
            "allowed_token_ids" if self.allowed_token_ids else "bad_words",
            "such that min_tokens and bad_words leave a token that may be sampled",
        )


def _check(is_valid: bool, param: str, requirement: str) -> None:
    if not is_valid:
        raise RequestRejectedError(
            ErrorCode.INVALID_REQUEST, f"{param} must be {requirement}", param
        )
