"""What crosses the engine's border: requests in, outputs out, and the counters between.

msgspec structs with closed types, so that the same values travel in process and over a socket.
Knows no text: prompts and outputs are token ids.
"""

from enum import StrEnum

import msgspec

from workers.adapters.ref import AdapterInfo, AdapterRef, prefix_salt
from workers.engine.content import ContentSpan
from workers.engine.encoder_input import EncoderInfo, EncoderInput
from workers.engine.logprobs import PackedLogprobs, TokenLogprobs
from workers.engine.media import MediaInfo, MediaItem
from workers.errors import ErrorCode
from workers.pooling.params import EmbeddingInfo, PoolingParams
from workers.sampling.params import SamplingParams


class FinishReason(StrEnum):
    """Why a request ended. STOP: end of sequence or a stop id. LENGTH: a token limit."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class GenerateRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One sequence to generate, or one prompt to make a vector of.

    Fields at their defaults do not travel, so that in a rolling upgrade an older engine takes what
    asks for nothing newer than it, and refuses the rest.

    request_id: unique among the engine's live requests. priority: lower runs first; equal
    priorities run first come, first served. cache_salt: requests share cached prefixes only with
    requests of the same salt. resumed_token_ids: output that the request has from an engine that
    was lost. It is output in every way, but not delivered again, and neither is what came with its
    first token: prompt log probabilities, cached tokens, queue and prefill times. With the same
    seed the request goes on as it would have there; without one it draws other noise. grammar: what
    the output has to obey, as llguidance writes grammars; empty: anything. It ends the output as
    soon as nothing more may follow. encoder_input: what the encoder reads where the model has one;
    the prompt is then its decoder's. content_spans: where the prompt has placeholders for what is
    no text. media: what stands behind them, of models that take it: each content once, by the
    spans' digests. pooling: what vector the prompt is to become; None: tokens are wanted. sampling
    has no meaning beside it. second_text_start: of an encoder's prompt that is a pair of texts, the
    first token of the second one; 0: it is one text. max_draft_tokens: of a step, 0 for none;
    None: as many as the engine verifies, which is also the most. adapter: what is added to the
    model for this request; None: nothing.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    priority: int = 0
    cache_salt: str = ""
    resumed_token_ids: list[int] = []
    grammar: str = ""
    encoder_input: EncoderInput | None = None
    content_spans: list[ContentSpan] = []
    pooling: PoolingParams | None = None
    media: list[MediaItem] = []
    second_text_start: int = 0
    max_draft_tokens: int | None = None
    adapter: AdapterRef | None = None

    @property
    def known_token_ids(self) -> list[int]:
        """Prompt and output so far: what an engine has to bring into its KV memory."""
        resumed = self.resumed_token_ids
        return self.prompt_token_ids + resumed if resumed else self.prompt_token_ids

    @property
    def prefix_salt(self) -> str:
        """Requests share cached prefixes with requests of the same one only."""
        return prefix_salt(self.cache_salt, self.adapter)

    @property
    def num_input_tokens(self) -> int:
        """What an engine has to compute before it can go on: known tokens, and at most so many of
        the encoder's."""
        own = len(self.prompt_token_ids) + len(self.resumed_token_ids)
        source = self.encoder_input
        return own if source is None else own + source.max_encoder_tokens


class OutputError(msgspec.Struct, frozen=True, array_like=True):
    """Why a request that had been accepted ended with FinishReason.ERROR."""

    code: ErrorCode
    message: str


class StepOutput(msgspec.Struct, array_like=True):
    """One request's share of one step. The last one of a request has a finish_reason.

    num_cached_tokens: prompt tokens found in the prefix cache, on the first output only.
    logprobs: one entry per token id when asked for. prompt_logprobs: on the first output, one entry
    per prompt token but the first, which nothing predicts, when asked for.
    queue_s, prefill_s: on the first output, seconds from submission to the first step and from
    there to the first token. embedding: on the only output of a request with pooling, float32,
    little-endian; it has no tokens then.
    """

    request_id: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    num_cached_tokens: int = 0
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: PackedLogprobs | None = None
    error: OutputError | None = None
    queue_s: float = 0.0
    prefill_s: float = 0.0
    embedding: bytes = b""


class AccountPages(msgspec.Struct, frozen=True, array_like=True):
    """An account of KV memory by its name (attention.memory.layout): all pages that can be handed
    out, those of running requests, and cached ones that nobody uses now."""

    name: str
    num_pages: int
    num_used: int
    num_evictable: int

    @property
    def usage(self) -> float:
        """Share of the pages that requests hold, 0 to 1."""
        return self.num_used / self.num_pages


class EngineStats(msgspec.Struct, frozen=True, array_like=True):
    """A snapshot of the engine's load. Counters only grow; everything else is of this moment.

    queued_tokens: prompt tokens not yet computed, waiting or half prefilled. running_tokens: tokens
    in the KV pool that belong to running requests. evictable pages hold cached prefixes that
    nobody uses now; used pages are those of running requests. evicted_ordinary, evicted_shared:
    cached prefixes whose last use ended when no more tokens than these had been written to KV
    memory are gone, those that requests shared by the second; -1: none is.
    step_prediction_error_s: seconds by which steps with prompt tokens miss the durations that were
    predicted for them, either way, as a mean over recent ones. num_draft_tokens: drafts that steps
    verified; those of them that were right are accepted, and part of num_output_tokens where they
    did not go beyond their request's end. num_drafted_runs: rows of steps that had drafts.
    accepted_by_position: how many of their first, second, ... drafts were right. num_pages,
    num_used_pages and num_evictable_pages are of the one of the accounts that will run short first.
    sleep_level: 0 for awake, else as SleepOrder.
    """

    num_running: int = 0
    num_waiting: int = 0
    queued_tokens: int = 0
    running_tokens: int = 0
    num_pages: int = 0
    num_used_pages: int = 0
    num_evictable_pages: int = 0
    num_steps: int = 0
    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    num_cached_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_finished: int = 0
    evicted_ordinary: int = -1
    evicted_shared: int = -1
    step_prediction_error_s: float = 0.0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    accounts: tuple[AccountPages, ...] = ()
    num_drafted_runs: int = 0
    accepted_by_position: tuple[int, ...] = ()
    sleep_level: int = 0

    @property
    def num_written_tokens(self) -> int:
        """Tokens ever written to KV memory."""
        return self.num_prompt_tokens - self.num_cached_prompt_tokens + self.num_output_tokens


class AttentionMeasurementRecord(msgspec.Struct, frozen=True):
    """What the attention of one layer took by a candidate of `auto-tuned`, in steps of rows that
    bring new_tokens each on top of prefix_tokens, both means. is_uneven: as StepPoint. is_chosen:
    whether such steps take the backend."""

    phase: str
    rows: int
    new_tokens: int
    prefix_tokens: int
    is_uneven: bool
    backend: str
    seconds: float
    is_chosen: bool


class ModelInfo(msgspec.Struct, frozen=True):
    """What the service must know of the engine's model to validate requests before it costs.

    max_request_len: tokens of a request, prompt and output; the context, or what the KV memory
    holds of one request if that is less. has_prefix_cache: whether what one request computed can be
    found by others. has_grammars: whether requests may bring one. encoder: what the model's encoder
    takes, None where it has none. embedding: what vectors it gives, None for none. media: what it
    takes in place of placeholders, None for nothing. is_encoder_only: it reads whole texts and
    generates none; it has no pages. attention_times: of `auto-tuned`, empty otherwise. adapters:
    which ones it takes, None for none. sleep_obstacle: why it
    cannot be told to sleep; "" where it can.
    """

    name: str
    vocab_size: int
    max_context_len: int
    eos_token_ids: tuple[int, ...]
    attention_backend: str
    page_size: int
    num_pages: int
    tp_size: int
    dtype: str
    max_request_len: int
    has_prefix_cache: bool = True
    has_grammars: bool = False
    encoder: EncoderInfo | None = None
    embedding: EmbeddingInfo | None = None
    media: MediaInfo | None = None
    is_encoder_only: bool = False
    attention_times: tuple[AttentionMeasurementRecord, ...] = ()
    adapters: AdapterInfo | None = None
    sleep_obstacle: str = "it does not know how to"
