"""StepPlan: everything a rank needs to run one step. Travels to every rank without pickle.

Arrays are int32 and flat. Rows are requests, new tokens are laid out row after row.
"""

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from workers.kv_cache.radix_node import EMPTY
from workers.protocol import TokenLogprobs
from workers.sampling.params import SamplingParams

IntArray = npt.NDArray[np.int32]

LAST_SAMPLED_TOKEN = -1
NAN_TOKEN = -1


class AdmittedRequest(msgspec.Struct, frozen=True):
    """A request that takes a slot with this step, for the first time or after a retraction.

    token_ids: prompt and, after a retraction, the output so far; the first num_prompt_tokens are
    the prompt. seed: the request's own or the one drawn for it at submission.
    """

    slot: int
    seed: int
    sampling: SamplingParams
    num_prompt_tokens: int
    token_ids: IntArray


class TableWrite(msgspec.Struct, frozen=True):
    """req_to_token[slot, start : start + len(cache_indices)] = cache_indices, before the step."""

    slot: int
    start: int
    cache_indices: IntArray


class PromptLogprobRow(msgspec.Struct, frozen=True):
    """A row whose prompt tokens want log probabilities.

    target_ids[j] is the prompt token that follows the row's new token j; it is one shorter than
    the row's new tokens when the row ends the prompt.
    """

    row: int
    num_top: int
    target_ids: IntArray


class StepPlan(msgspec.Struct, frozen=True):
    """One step over bs rows and num_tokens new tokens.

    is_decode: every row brings exactly one token. slots (bs,): row of req_to_token.
    num_new_tokens (bs,), prefix_lens (bs,): tokens computed now and tokens already in the pool.
    samples (bs,): 1 where the row's last new token yields a next token, else 0.
    input_ids (num_tokens,): token ids; LAST_SAMPLED_TOKEN stands for the token that the row's slot
    sampled last, which only the device may know yet. out_cache_loc (num_tokens,): cache index of
    each new token; the runner also writes it to req_to_token[slot, prefix_len:].
    cleared (n,): cache indices whose keys and values become zeros, because they may be no numbers
    and belong to nobody any more. cleared, admitted and table_writes take effect before the step.
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

    @property
    def batch_size(self) -> int:
        return len(self.slots)

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)


class StepResult(msgspec.Struct, frozen=True):
    """What a step produced, on the host.

    token_ids (num sampling rows,) in row order, NAN_TOKEN where the row's logits held a NaN;
    logprobs runs parallel to it, None where not asked.
    prompt_logprobs: by row, one entry per target id of that row's PromptLogprobRow.
    """

    token_ids: IntArray
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    prompt_logprobs: dict[int, tuple[TokenLogprobs, ...]] = {}


def _encode_array(value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.dtype == np.int32:
        return value.tobytes()
    raise TypeError(f"a plan holds int32 arrays only, got {type(value)}")


def _decode_array(kind: Any, value: Any) -> Any:
    if isinstance(value, bytes) and len(value) % 4 == 0:
        return np.frombuffer(value, dtype=np.int32)
    raise ValueError(f"expected int32 bytes for {kind}")


def make_plan_encoder() -> msgspec.msgpack.Encoder:
    return msgspec.msgpack.Encoder(enc_hook=_encode_array)


def make_plan_decoder() -> msgspec.msgpack.Decoder[StepPlan]:
    return msgspec.msgpack.Decoder(StepPlan, dec_hook=_decode_array)
