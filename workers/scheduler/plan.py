"""StepPlan: everything a rank needs to run one step. Travels to every rank without pickle.

Arrays are int32 and flat. Rows are requests, new tokens are laid out row after row.
"""

from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from attention.forward_batch import RAGGED, ForwardMode, StepShape
from workers.constraints.masks import StepMasks
from workers.engine.logprobs import PackedLogprobs, TokenLogprobs
from workers.kv_cache.radix_node import EMPTY
from workers.pooling.params import Pooling
from workers.pooling.vectors import FloatArray
from workers.sampling.params import SamplingParams
from workers.scheduler.adapter_plan import NO_ADAPTERS, AdapterPlan
from workers.scheduler.encoder_plan import EncoderPlan
from workers.scheduler.media_plan import NO_MEDIA, MediaPlan
from workers.scheduler.state_moves import NO_RESTORES, NO_SAVES, StateRestores, StateSaves

IntArray = npt.NDArray[np.int32]

LAST_SAMPLED_TOKEN = -1
DRAFT_TOKEN = -2
NAN_TOKEN = -1


class AdmittedRequest(msgspec.Struct, frozen=True):
    """A request that takes a slot with this step, for the first time or after a retraction.

    seed: the request's own or the one drawn for it at submission. Its tokens come with the steps
    that compute them; what is cached needs none. prompt_ids: the ids that occur in the prompt, each
    once, where a repetition penalty asks for them. output_ids: the output that it brings, where a
    penalty counts it or bad words go on from it. known_ids: prompt and output so far, in order,
    where drafts are proposed, and cache_salt: what the request shares is for requests of the same
    salt only. All are empty otherwise.
    """

    slot: int
    seed: int
    sampling: SamplingParams
    num_prompt_tokens: int
    prompt_ids: IntArray = EMPTY
    output_ids: IntArray = EMPTY
    known_ids: IntArray = EMPTY
    cache_salt: str = ""


class TableWrite(msgspec.Struct, frozen=True):
    """Pages int32 (n,) that stand in the tables of slots int32 (m,) from page first_page on.

    account: 0 keeps every token, the bounded ones follow. In its table the row of each of the slots
    goes on with the pages' cache indices from first_page * page_size on, before the step.
    """

    slots: IntArray
    first_page: int
    pages: IntArray
    account: int = 0


class PromptLogprobRow(msgspec.Struct, frozen=True):
    """A row whose prompt tokens want log probabilities.

    target_ids[j] is the prompt token that follows the row's new token j; it is one shorter than
    the row's new tokens when the row ends the prompt.
    """

    row: int
    num_top: int
    target_ids: IntArray


class PooledRow(msgspec.Struct, frozen=True):
    """A row of a prompt of which a vector is wanted: LAST where it ends that prompt, MEAN for each
    chunk of it."""

    row: int
    method: Pooling


class StepPlan(msgspec.Struct, frozen=True):
    """One step over bs rows and num_tokens new tokens.

    is_decode: every row brings exactly one token. slots (bs,): row of req_to_token.
    num_new_tokens (bs,), prefix_lens (bs,): tokens computed now and tokens already in the pool.
    samples (bs,): how many of the row's last new tokens yield a next token each: 0 where a prompt
    goes on, 1, or all of a run, which begins with the token sampled last and goes on with drafts.
    input_ids (num_tokens,): token ids; LAST_SAMPLED_TOKEN stands for the token that the row's slot
    sampled last, which only the device may know yet, DRAFT_TOKEN for what is proposed to follow.
    out_cache_loc (num_tokens,): cache index of each new token; the runner also writes it to
    req_to_token[slot, prefix_len:].

    Where slots have runs under way, prefix_lens of rows that begin with LAST_SAMPLED_TOKEN are
    upper bounds: every draft counted as right. The device knows how many were; the row's tokens
    then stand that many positions earlier, in the cache indices that the table has there.

    cleared (n,): cache indices whose keys and values become zeros, because they may be no numbers
    and belong to nobody any more. bounded_cache_locs, bounded_cleared: the same of each account
    that does not keep every token. masked_slots (n,): whose samples wait for masks of the tokens
    that a grammar allows; the host makes them while the step runs. encoder: what encoders compute
    for admitted requests. media: what images the step shows. adapters: who has which. What is
    cleared, admitted, table_writes, the encoders, state_restores, media and adapters take effect,
    in that order, before the step. state_saves: during it.

    parents: empty, where the drafts of every row stand one behind the other. Else int32
    (num_tokens,): which of its row's new tokens, all of which yield a next one, each stands behind,
    one before it; -1 for the first. The row's new tokens are still written one behind the other.
    Tokens behind the same one differ.

    pooled: rows that samples says nothing of, because a vector is their request's result.
    """

    step_id: int
    is_decode: bool
    slots: IntArray
    num_new_tokens: IntArray
    prefix_lens: IntArray
    samples: IntArray
    input_ids: IntArray
    out_cache_loc: IntArray
    admitted: tuple[AdmittedRequest, ...] = ()
    table_writes: tuple[TableWrite, ...] = ()
    cleared: IntArray = EMPTY
    prompt_logprobs: tuple[PromptLogprobRow, ...] = ()
    pooled: tuple[PooledRow, ...] = ()
    bounded_cache_locs: tuple[IntArray, ...] = ()
    bounded_cleared: tuple[IntArray, ...] = ()
    masked_slots: IntArray = EMPTY
    encoder: EncoderPlan = EncoderPlan()
    state_restores: StateRestores = NO_RESTORES
    state_saves: StateSaves = NO_SAVES
    media: MediaPlan = NO_MEDIA
    parents: IntArray = EMPTY
    adapters: AdapterPlan = NO_ADAPTERS

    @property
    def batch_size(self) -> int:
        return len(self.slots)

    @property
    def decode_rows(self) -> npt.NDArray[np.bool_]:
        """Which rows go on behind their prompt, (bs,); a prompt's last token counts as one, too."""
        mask: npt.NDArray[np.bool_] = (self.samples == self.num_new_tokens) & (self.prefix_lens > 0)
        return mask

    @property
    def num_decode_tokens(self) -> int:
        """New tokens of these rows."""
        if self.is_decode:
            return int(np.count_nonzero(self.decode_rows))
        return int(self.num_new_tokens.sum(where=self.decode_rows))

    @property
    def has_repeats(self) -> bool:
        """Whether rows of one slot follow each other: of tokens that a grammar forces. Each sees
        the keys of those before it, which must be stored before any row attends."""
        slots = self.slots
        return self.has_masks and bool((slots[1:] == slots[:-1]).any())

    @property
    def has_masks(self) -> bool:
        """Whether a row's sample waits for a mask."""
        return len(self.masked_slots) > 0

    @property
    def has_runs(self) -> bool:
        """Whether a row yields more than one token."""
        return not self.is_decode and bool((self.samples > 1).any())

    @property
    def has_trees(self) -> bool:
        """Whether a row has several drafts of one place."""
        return len(self.parents) > 0

    @property
    def mode(self) -> ForwardMode:
        """TARGET_VERIFY where no row computes a prompt and one at least is a run."""
        if self.is_decode:
            return ForwardMode.DECODE
        is_verify = bool((self.samples == self.num_new_tokens).all())
        return ForwardMode.TARGET_VERIFY if is_verify else ForwardMode.EXTEND

    @property
    def shape(self) -> StepShape:
        """Takes longer to find out than mode alone."""
        if self.is_decode:
            return StepShape(ForwardMode.DECODE, self.batch_size, 1)
        lens = self.num_new_tokens
        is_even = bool((lens == lens[0]).all())
        return StepShape(self.mode, self.batch_size, int(lens[0]) if is_even else RAGGED)

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)


class StepResult(msgspec.Struct, frozen=True):
    """What a step produced, on the host.

    token_ids: what sampling rows yield, in row order, NAN_TOKEN where logits held a NaN; logprobs
    runs parallel to it, None where not asked. run_lens (num sampling rows,): how many of token_ids
    are each row's; empty where it is one each. num_drafts: of the same rows, how many drafts were
    verified; empty where it is as many as the plan has.
    prompt_logprobs: by row, one entry per target id of that row's PromptLogprobRow.
    pooled: row and vector, float32 (hidden_size,), of each PooledRow: the row's last final state,
    or the sum over its new tokens' ones.
    chunk_has_nan: for each row that samples nothing, in row order, whether the final state of its
    last new token holds a NaN; the sampled rows say it by NAN_TOKEN.
    failed_rows: rows of the plan that the device had no memory for. Whatever else stands here for
    them means nothing, but a sampling one has its place in token_ids and logprobs.
    """

    token_ids: IntArray
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    prompt_logprobs: dict[int, PackedLogprobs] = {}
    chunk_has_nan: tuple[bool, ...] = ()
    failed_rows: tuple[int, ...] = ()
    run_lens: IntArray = EMPTY
    num_drafts: IntArray = EMPTY
    pooled: tuple[tuple[int, FloatArray], ...] = ()


def drafts_of(plan: StepPlan) -> dict[int, tuple[int, ...]]:
    """By slot, of rows that have any. The plan names them."""
    if not plan.has_runs:
        return {}
    stops = np.cumsum(plan.num_new_tokens)
    rows = np.flatnonzero(plan.samples > 1)
    return {
        int(plan.slots[row]): tuple(
            plan.input_ids[stops[row] - plan.samples[row] + 1 : stops[row]].tolist()
        )
        for row in rows.tolist()
    }


def _encode_array(value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.dtype == np.int32:
        return value.tobytes()
    raise TypeError(f"a plan holds int32 arrays only, got {type(value)}")


def _decode_array(kind: Any, value: Any) -> Any:
    if isinstance(value, bytes) and len(value) % 4 == 0:
        return np.frombuffer(value, dtype=np.int32)
    raise ValueError(f"expected int32 bytes for {kind}")


class PlanPart(Protocol):
    """What only some models have and what has its say in a step's plan."""

    def add_to(self, plan: StepPlan) -> StepPlan:
        """The plan, with what it must carry out beside its rows."""
        ...


def make_plan_encoder() -> msgspec.msgpack.Encoder:
    return msgspec.msgpack.Encoder(enc_hook=_encode_array)


def make_masks_decoder() -> msgspec.msgpack.Decoder[StepMasks]:
    return msgspec.msgpack.Decoder(StepMasks, dec_hook=_decode_array)


def make_plan_decoder() -> msgspec.msgpack.Decoder[StepPlan]:
    return msgspec.msgpack.Decoder(StepPlan, dec_hook=_decode_array)
