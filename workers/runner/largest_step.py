"""The step that takes the most memory of a device, so that a start can try whether there is enough.

As many new tokens as a step may have, in as many rows as may run, all of them sampled, with as many
drafts as a step verifies, by filters, log probabilities and what takes tables of all slots and
tokens, which nobody has made before (penalties, allowed tokens), and one prompt with log
probabilities. Of an encoder-decoder, one row's input is read, the longest there is, and the others
find what an encoder has made. Knows plans, no device.
"""

import msgspec
import numpy as np

from attention.memory.token_to_kv_pool import NUM_RESERVED_PAGES
from workers.kv_cache.radix_node import EMPTY, IntArray
from workers.sampling.params import SamplingParams
from workers.scheduler.config import EncoderAccount, SchedulerConfig
from workers.scheduler.encoder_plan import EncoderGrant, EncoderPlan
from workers.scheduler.plan import AdmittedRequest, PromptLogprobRow, StepPlan

_SAMPLING = SamplingParams(
    temperature=1.0,
    top_p=0.9,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    allowed_token_ids=(0,),
    logprobs=1,
    prompt_logprobs=1,
    seed=0,
)


def largest_step(config: SchedulerConfig) -> StepPlan:
    """Prompts on the pool's first pages and slots, which therefore must be free.

    Has fewer tokens or rows where the pool or the context hold no more. All accounts use pages of
    the same numbers.
    """
    num_pages = min([config.num_pages, *(account.num_pages for account in config.bounded)])
    pages = np.arange(1, num_pages, dtype=np.int32)
    num_rows = min(config.max_slots, len(pages))
    if config.encoder is not None:
        num_rows = min(num_rows, 1 + _pages_beside_longest(config.encoder, config.page_size))
    most = min(config.max_request_len - 1, len(pages) // num_rows * config.page_size)
    share, num_longer = divmod(config.max_step_tokens, num_rows)
    lengths = np.full(num_rows, share, dtype=np.int32)
    lengths[:num_longer] += 1
    lengths = np.minimum(lengths, most)
    num_tokens = int(lengths.sum())
    input_ids = np.arange(num_tokens, dtype=np.int32) % np.int32(config.vocab_size)
    row_pages = np.split(pages[: len(pages) // num_rows * num_rows], num_rows)
    locations = np.concatenate(
        [
            _locations(own, int(n), config.page_size)
            for own, n in zip(row_pages, lengths, strict=True)
        ]
    )
    return StepPlan(
        step_id=0,
        is_decode=bool(lengths.max() == 1),
        slots=np.arange(num_rows, dtype=np.int32),
        num_new_tokens=lengths,
        prefix_lens=np.zeros(num_rows, dtype=np.int32),
        samples=np.minimum(lengths, _samples_a_row(config, num_rows)),
        input_ids=input_ids,
        out_cache_loc=locations,
        bounded_cache_locs=(locations,) * len(config.bounded),
        admitted=tuple(
            AdmittedRequest(slot, 0, _SAMPLING, num_prompt_tokens=int(n))
            for slot, n in enumerate(lengths)
        ),
        prompt_logprobs=_prompt_logprobs(input_ids[1 : lengths[0]]),
        encoder=_encoders(config, num_rows),
    )


def _samples_a_row(config: SchedulerConfig, num_rows: int) -> np.int32:
    """Of so many rows with as many drafts as a step takes beside one token of each."""
    room = max(config.max_step_tokens - num_rows, 0) // 2 // num_rows
    return np.int32(1 + min(config.max_draft_tokens, room))


def _pages_beside_longest(account: EncoderAccount, page_size: int) -> int:
    """Of the account, those that are left beside the longest input of one request."""
    return account.num_pages - NUM_RESERVED_PAGES - -(-account.info.max_tokens // page_size)


def _encoders(config: SchedulerConfig, num_rows: int) -> EncoderPlan:
    """The longest input for the first slot, and a share of the other pages for each of the rest."""
    account, page_size = config.encoder, config.page_size
    if account is None:
        return EncoderPlan()
    pages = np.arange(NUM_RESERVED_PAGES, account.num_pages, dtype=np.int32)
    most, num_left = account.info.max_tokens, _pages_beside_longest(account, page_size)
    own, others = pages[: len(pages) - num_left], pages[len(pages) - num_left :]
    grants = [EncoderGrant(0, most, own, account.info.longest())]
    share = min(len(own), num_left // (num_rows - 1)) if num_rows > 1 else 0
    for slot in range(1, num_rows):
        held = others[(slot - 1) * share : slot * share]
        grants.append(EncoderGrant(slot, min(most, share * page_size), held, None))
    return EncoderPlan(grants=tuple(grants))


def without_trace(plan: StepPlan, page_size: int) -> StepPlan:
    """Clears what the largest step, which plan is, has written."""
    offsets = np.arange(page_size, dtype=np.int32)
    written = [
        (grant.pages[:, None] * np.int32(page_size) + offsets).ravel()
        for grant in plan.encoder.grants
    ]
    return msgspec.structs.replace(
        plan,
        cleared=plan.out_cache_loc,
        bounded_cleared=plan.bounded_cache_locs,
        encoder=EncoderPlan(cleared=np.concatenate([EMPTY, *written])),
    )


def _locations(pages: IntArray, num_tokens: int, page_size: int) -> IntArray:
    positions = np.arange(num_tokens, dtype=np.int32)
    return pages[positions // page_size] * np.int32(page_size) + positions % np.int32(page_size)


def _prompt_logprobs(target_ids: IntArray) -> tuple[PromptLogprobRow, ...]:
    return (PromptLogprobRow(0, 1, target_ids),) if len(target_ids) else ()
