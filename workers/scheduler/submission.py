"""What is refused at the door: requests that are wrong, that can never fit or for which the queue
is full. Allocates nothing.
"""

import random
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from workers.engine.content import check_spans
from workers.engine.media import MediaSpan
from workers.engine.protocol import GenerateRequest
from workers.errors import ErrorCode, RequestRejectedError
from workers.kv_cache.radix_node import IntArray
from workers.pooling.params import DECODER_POOLINGS, PoolingParams
from workers.scheduler.config import SchedulerConfig
from workers.scheduler.content_keys import ContentKeys
from workers.scheduler.encoder_read import EncoderRead
from workers.scheduler.ledger import Ledger
from workers.scheduler.request import Request
from workers.scheduler.waiting_queue import WaitingQueue


class _Checked(NamedTuple):
    """Of a request: its longest length, what its encoder reads, its tokens, int32 (n,), and what
    stands behind its placeholders."""

    max_total_len: int
    encoder: EncoderRead | None
    token_ids: IntArray
    media: tuple[MediaSpan, ...]


class Submission:
    """Turns a GenerateRequest into a Request or raises RequestRejectedError."""

    def __init__(self, config: SchedulerConfig, waiting: WaitingQueue, ledger: Ledger) -> None:
        self._config = config
        self._waiting = waiting
        self._ledger = ledger
        self._eos_ids = frozenset(config.eos_token_ids)
        self._seeds = random.Random(config.seed)
        self._content_keys = ContentKeys()
        self._num_accepted = 0

    def accept(
        self, spec: GenerateRequest, now_s: float, make: Callable[..., Request] = Request
    ) -> Request:
        """make: the kind of request, called with the fields of Request.

        Checks cheapest first; the vocabulary, which costs the prompt's length, comes last, and then
        what images cost.
        Raises RequestRejectedError: INVALID_REQUEST, CONTEXT_LENGTH_EXCEEDED or QUEUE_FULL.
        """
        max_total_len, encoder, tokens, media = self.check(spec, 0, 0)
        seed = spec.sampling.seed
        request = make(
            request_id=spec.request_id,
            sampling=spec.sampling,
            priority=spec.priority,
            # Tokens behind different inputs of the encoder have different keys and values.
            cache_salt=spec.prefix_salt if encoder is None else encoder.key,
            buffer=tokens,
            num_tokens=len(tokens),
            num_prompt_tokens=len(spec.prompt_token_ids),
            max_total_len=max_total_len,
            stop_ids=self._stop_ids(spec),
            seed=self._seeds.getrandbits(63) if seed is None else seed,
            arrival=self._num_accepted,
            submitted_s=now_s,
            is_resumed=bool(spec.resumed_token_ids),
            max_draft_tokens=self._max_drafts(spec),
            encoder=encoder,
            content=self._content_keys.runs(spec.content_spans),
            media=media,
            adapter=spec.adapter,
        )
        self._num_accepted += 1
        return request

    def check(self, spec: GenerateRequest, num_elsewhere: int, tokens_elsewhere: int) -> _Checked:
        """elsewhere: requests and their tokens that wait beside the queue.

        Raises as accept does.
        """
        max_total_len = self._max_total_len(spec)
        if spec.pooling is None:
            _check_unfinished(spec, max_total_len)
        else:
            _check_pooled(spec, spec.pooling, self._config.embedding_size)
        if spec.adapter is not None and not self._config.num_adapter_slots:
            raise RequestRejectedError(
                ErrorCode.INVALID_REQUEST, "this engine takes no adapters", "model"
            )
        check_spans(spec.content_spans, len(spec.prompt_token_ids))
        if spec.second_text_start:
            raise RequestRejectedError(
                ErrorCode.INVALID_REQUEST, "this model reads no pairs of texts", "second_text_start"
            )
        spec.sampling.validate(self._config.vocab_size)
        spec.sampling.check_something_is_left(self._config.vocab_size, self._stop_ids(spec))
        encoder = self._read_of(spec)
        num_tokens = len(spec.prompt_token_ids) + len(spec.resumed_token_ids)
        num_tokens += 0 if encoder is None else encoder.num_tokens
        self._check_queue(num_tokens, num_elsewhere, tokens_elsewhere)
        token_ids = self._checked_tokens(spec)
        return _Checked(max_total_len, encoder, token_ids, self._media_of(spec, token_ids))

    def _stop_ids(self, spec: GenerateRequest) -> frozenset[int]:
        stop_ids = frozenset(spec.sampling.stop_token_ids)
        return stop_ids if spec.sampling.ignore_eos else stop_ids | self._eos_ids

    def _max_drafts(self, spec: GenerateRequest) -> int:
        asked, most = spec.max_draft_tokens, self._config.max_draft_tokens
        return most if asked is None else min(asked, most)

    def _read_of(self, spec: GenerateRequest) -> EncoderRead | None:
        account = self._config.encoder
        if account is not None:
            return EncoderRead.of(spec.encoder_input, spec.cache_salt, account.info)
        if spec.encoder_input is None:
            return None
        raise RequestRejectedError(
            ErrorCode.INVALID_REQUEST, "this model has no encoder", "encoder_input"
        )

    def _media_of(self, spec: GenerateRequest, token_ids: IntArray) -> tuple[MediaSpan, ...]:
        """Of a model that takes none, placeholders are tokens as others are."""
        info = self._config.media
        if info is not None:
            self._check_media_bytes(sum(len(item.values) for item in spec.media))
            prompt_ids = token_ids[: len(spec.prompt_token_ids)]
            return info.spans_of(spec.content_spans, spec.media, prompt_ids)
        if spec.media:
            raise RequestRejectedError(
                ErrorCode.INVALID_REQUEST, "this model takes no images", "media"
            )
        return ()

    def _check_media_bytes(self, num_bytes: int) -> None:
        """Who comes when nobody else has brought any may bring as much as a prompt has room for."""
        held, most = self._ledger.num_media_bytes if num_bytes else 0, self._config.max_media_bytes
        if held and held + num_bytes > most:
            raise RequestRejectedError(
                ErrorCode.QUEUE_FULL,
                f"requests at hand have brought {held} bytes of images, the engine holds {most} "
                f"(max_media_bytes) and this one brings {num_bytes}",
            )

    def _max_total_len(self, spec: GenerateRequest) -> int:
        num_prompt, max_tokens = len(spec.prompt_token_ids), spec.sampling.max_tokens
        if num_prompt == 0:
            raise RequestRejectedError(
                ErrorCode.INVALID_REQUEST, "the prompt must have at least one token", "prompt"
            )
        if spec.pooling is not None:
            # All of it enters the pool, and nothing behind it.
            self._check_fits(num_prompt, 0, "prompt")
            return num_prompt
        self._check_fits(num_prompt, 1, "prompt")
        if max_tokens is None:
            self._check_fits(num_prompt, spec.sampling.min_tokens, "min_tokens")
            return self._config.max_request_len
        self._check_fits(num_prompt, max_tokens, "max_tokens")
        return num_prompt + max_tokens

    def _check_fits(self, num_prompt: int, num_output: int, param: str) -> None:
        """The last output token is never computed on, so that it takes no room in the pool."""
        config, total = self._config, num_prompt + num_output
        num_pooled = max(num_prompt, total - 1)
        if total > config.max_context_len:
            reason = f"this model's context is {config.max_context_len} tokens"
        elif num_pooled > config.pool_tokens:
            reason = (
                f"they take {-(-num_pooled // config.page_size)} pages of {config.page_size} "
                f"tokens and this engine has {config.num_pages - 1}"
            )
        else:
            return
        raise RequestRejectedError(
            ErrorCode.CONTEXT_LENGTH_EXCEEDED,
            f"{num_prompt} prompt tokens and {num_output} output tokens are {total}: {reason}",
            param,
        )

    def _check_queue(self, num_tokens: int, num_elsewhere: int, tokens_elsewhere: int) -> None:
        """An empty queue takes any request: otherwise a long prompt could never get in."""
        config = self._config
        num_waiting = len(self._waiting) + num_elsewhere
        waiting_tokens = self._waiting.num_tokens + tokens_elsewhere
        if num_waiting >= config.max_waiting_requests:
            raise RequestRejectedError(
                ErrorCode.QUEUE_FULL, f"{num_waiting} requests are waiting already"
            )
        if num_waiting and waiting_tokens + num_tokens > config.max_waiting_tokens:
            raise RequestRejectedError(
                ErrorCode.QUEUE_FULL,
                f"{waiting_tokens} tokens are waiting already, the queue takes "
                f"{config.max_waiting_tokens}",
            )

    def _checked_tokens(self, spec: GenerateRequest) -> IntArray:
        token_ids, vocab_size = spec.known_token_ids, self._config.vocab_size
        low, high = min(token_ids), max(token_ids)
        if low < 0 or high >= vocab_size:
            raise RequestRejectedError(
                ErrorCode.INVALID_REQUEST,
                f"token id {low if low < 0 else high} is not in [0, {vocab_size})",
                "prompt",
            )
        return np.array(token_ids, dtype=np.int32)


def _check_unfinished(spec: GenerateRequest, max_total_len: int) -> None:
    if len(spec.prompt_token_ids) + len(spec.resumed_token_ids) >= max_total_len:
        raise RequestRejectedError(
            ErrorCode.INVALID_REQUEST,
            f"the request has {len(spec.resumed_token_ids)} output tokens already, no more are "
            "wanted",
            "resumed_token_ids",
        )


def _check_pooled(spec: GenerateRequest, pooling: PoolingParams, embedding_size: int) -> None:
    pooling.validate(embedding_size)
    if pooling.method not in DECODER_POOLINGS:
        raise RequestRejectedError(
            ErrorCode.INVALID_REQUEST, f"a decoder is not pooled by {pooling.method}", "pooling"
        )
    for param, is_asked in (
        ("grammar", bool(spec.grammar)),
        ("resumed_token_ids", bool(spec.resumed_token_ids)),
        ("prompt_logprobs", spec.sampling.prompt_logprobs is not None),
    ):
        if is_asked:
            raise RequestRejectedError(
                ErrorCode.INVALID_REQUEST, f"a request for an embedding has no {param}", param
            )
