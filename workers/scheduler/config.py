"""SchedulerConfig: limits and switches of the scheduler, frozen and validated once."""

from dataclasses import dataclass

from attention.memory.layout import FixedLength
from workers.engine.encoder_input import EncoderInfo
from workers.engine.media import MediaInfo
from workers.errors import ConfigError
from workers.kv_cache.bounded_pages import Retention, span_pages
from workers.speculation.config import DraftPolicyName

_MAX_CACHE_INDEX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class BoundedAccount:
    """KV memory of layers that see a token for a while only. num_pages counts page 0, too."""

    retention: Retention
    num_pages: int

    def min_pages(self, page_size: int) -> int:
        """What one request that runs alone may hold at once, of a cached prefix and of its own,
        and one page to go on with; page 0 is counted."""
        return 2 * span_pages(self.retention, page_size) + 2


@dataclass(frozen=True, slots=True)
class EncoderAccount:
    """The account of what an encoder makes of requests' inputs. num_pages counts page 0."""

    num_pages: int
    info: EncoderInfo

    @property
    def retention(self) -> FixedLength:
        return FixedLength(self.info.max_tokens)

    def check(self, page_size: int) -> None:
        """Raise ConfigError unless the longest input of one request has room."""
        if self.num_pages * page_size > _MAX_CACHE_INDEX:
            raise ConfigError(f"{self.num_pages} encoder pages exceed int32 cache indices")
        if (self.num_pages - 1) * page_size < self.info.max_tokens:
            raise ConfigError(
                f"{self.num_pages} pages of {page_size} tokens, one of them reserved, do not hold "
                f"the {self.info.max_tokens} tokens that the encoder makes of one request"
            )


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """What the scheduler must know of the model, of KV memory and of the operator's wishes.

    num_pages counts page 0, which is reserved for padding and never handed out.
    max_step_tokens: new tokens of one step, decode rows first. target_inter_token_s: what a step
    that decode rows wait for may be predicted to last; None: anything. seed: draws the seeds of
    requests that bring none; None takes entropy. enable_mixed_batches: prefill chunks and decode
    rows in one step. bounded: the accounts beside the one that keeps every token.
    max_draft_tokens: drafts that a row may verify in one step, 0 without speculation; draft_policy:
    who chooses how many it does; has_draft_trees: they are trees. encoder: of models that have one.
    num_snapshots: places for states after prefixes, of a model that keeps states; 0 where it keeps
    none. Such a model's prefixes are cached where there are places only.
    product_s: seconds of a step's products with 1, 2, ... tiles of TILE_TOKENS tokens; empty where
    they were not timed. embedding_size: values of the vector that a prompt can be pooled to; 0
    where the model gives none. media: what the model takes in place of placeholders, None for
    nothing. max_media_bytes: of what live requests have brought. can_repeat_slots: whether decode
    rows of one step may belong to one slot, as they may where nothing but keys and values of every
    token is kept of a request. can_run_again: whether a decode row may bring its token in a later
    step once more, as it may where no state has taken it in. num_adapter_slots: adapters
    that running requests may have together; 0 where none are served.
    """

    page_size: int
    num_pages: int
    max_running_requests: int
    max_context_len: int
    max_step_tokens: int
    target_inter_token_s: float | None
    max_waiting_requests: int
    max_waiting_tokens: int
    enable_prefix_cache: bool
    enable_mixed_batches: bool
    eos_token_ids: tuple[int, ...]
    vocab_size: int
    seed: int | None
    bounded: tuple[BoundedAccount, ...] = ()
    max_draft_tokens: int = 0
    draft_policy: DraftPolicyName = "fixed"
    has_draft_trees: bool = False
    encoder: EncoderAccount | None = None
    num_snapshots: int = 0
    product_s: tuple[float, ...] = ()
    embedding_size: int = 0
    media: MediaInfo | None = None
    can_repeat_slots: bool = False
    can_run_again: bool = False
    max_media_bytes: int = 1 << 30
    num_adapter_slots: int = 0

    def __post_init__(self) -> None:
        minima = {
            "num_snapshots": 0,
            "page_size": 1,
            "num_pages": 2,
            "max_running_requests": 1,
            "max_context_len": 2,
            "max_step_tokens": 1,
            "max_waiting_requests": 1,
            "max_waiting_tokens": 1,
            "vocab_size": 1,
        }
        for name, minimum in minima.items():
            if getattr(self, name) < minimum:
                raise ConfigError(f"{name} must be at least {minimum}, got {getattr(self, name)}")
        if self.target_inter_token_s is not None and self.target_inter_token_s <= 0.0:
            raise ConfigError(
                f"target_inter_token_s must be above 0, got {self.target_inter_token_s}"
            )
        if self.max_draft_tokens < 0:
            raise ConfigError(f"max_draft_tokens must not be negative, got {self.max_draft_tokens}")
        if self.can_repeat_slots and (self.max_draft_tokens or self.bounded or self.encoder):
            raise ConfigError(
                "rows of one slot: beside drafts, windows and encoders there are none"
            )
        if self.max_draft_tokens and self.bounded:
            raise ConfigError("speculative: layers with windows or chunks cannot take drafts yet")
        self._check_accounts()

    def _check_accounts(self) -> None:
        if self.encoder is not None:
            self.encoder.check(self.page_size)
        for num_pages in (self.num_pages, *(account.num_pages for account in self.bounded)):
            if num_pages * self.page_size > _MAX_CACHE_INDEX:
                raise ConfigError(
                    f"{num_pages} pages of {self.page_size} tokens exceed int32 cache indices"
                )
        for account in self.bounded:
            # No account holds more than account 0 does, nor than a request that runs alone.
            least = min(
                account.min_pages(self.page_size), self.num_pages, self.max_pages_per_request + 1
            )
            if account.num_pages < least:
                raise ConfigError(
                    f"{account.num_pages} pages of {self.page_size} tokens are too few for a "
                    f"request that sees {account.retention.num_tokens}: at least {least} are needed"
                )

    @property
    def pool_tokens(self) -> int:
        """Tokens that the pool can hold for one request that has it alone."""
        return (self.num_pages - 1) * self.page_size

    @property
    def max_request_len(self) -> int:
        """Prompt and output of the longest request: the last token never enters the pool."""
        return min(self.max_context_len, self.pool_tokens + 1)

    @property
    def max_slots(self) -> int:
        """Requests that run at once.

        Every decode row must fit into one step's budget, and a half-prefilled request must find
        room for at least one token beside the others' decode rows.
        """
        return min(self.max_running_requests, self.max_step_tokens)

    @property
    def max_pages_per_request(self) -> int:
        return -(-self.max_request_len // self.page_size)
