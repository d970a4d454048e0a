"""From a StepPlan to the tensors of a ForwardBatch, in one host-to-device copy; and what is had of
a step between its forward pass and its results on the host.

Knows the plan's layout and the memory that it changes; no model, no sampling parameters.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from attention.forward_batch import AttentionDispatch, ForwardBatch, ForwardMode
from attention.memory.req_to_token_pool import ReqToTokenPool
from attention.memory.token_to_kv_pool import TokenToKVPool
from attention.visibility import Tree
from workers.models.token_inputs import PlacedEmbeddings
from workers.pooling.states import PooledStates
from workers.sampling.logprobs import LogprobTensors, pack_logprobs
from workers.sampling.run_drafts import RunDrafts
from workers.sampling.state import SampledTokens
from workers.sampling.transfer import upload
from workers.scheduler.plan import (
    IntArray,
    PromptLogprobRow,
    StepPlan,
    StepResult,
    TableWrite,
)
from workers.scheduler.plan_tree import PlanTrees


@dataclass(frozen=True, slots=True)
class StepInputs:
    """A ForwardBatch and the device indices around it.

    token_slots int64 (num_tokens,): slot of each new token. state_indices int64 (num samples + num
    unfinished rows,): index of each hidden state that yields a next token, row after row, then of
    the last one of every row whose prompt goes on. sample_slots_device int64 (num samples,): the
    slots of the first. sample_slots, sample_positions: host int32 (num samples,), slot and absolute
    position of the token to be sampled. num_samples: host int32 (num sampling rows,), of each row.
    masked_slots: host int32 (n,), those of sample_slots that wait for the masks of step step_id.
    drafts: of the samples, None where no row has any. trees: None where these stand one behind the
    other. positions, embeddings: as in TokenInputs.
    """

    batch: ForwardBatch
    positions: torch.Tensor
    token_slots: torch.Tensor
    state_indices: torch.Tensor
    sample_slots_device: torch.Tensor
    sample_slots: IntArray
    sample_positions: IntArray
    num_samples: IntArray
    step_id: int
    masked_slots: IntArray
    drafts: RunDrafts | None
    trees: PlanTrees | None = None
    embeddings: PlacedEmbeddings | None = None


@dataclass(frozen=True, slots=True)
class BegunStep:
    """A step whose forward pass is launched and whose samples are not drawn. logits: a row for each
    token to be sampled, None where no row samples; the rest as in LaunchedStep."""

    inputs: StepInputs
    logits: torch.Tensor | None
    prompt_logprobs: tuple[tuple[PromptLogprobRow, LogprobTensors], ...]
    chunk_has_nan: torch.Tensor | None
    pooled: PooledStates | None


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step's results on their way to the host; readable once the device has passed.

    chunk_has_nan: bool (num rows that sample nothing,), None where every row samples. pooled: None
    where no row is.
    """

    sampled: SampledTokens
    prompt_logprobs: tuple[tuple[PromptLogprobRow, LogprobTensors], ...] = ()
    chunk_has_nan: torch.Tensor | None = None
    pooled: PooledStates | None = None

    def read(self) -> StepResult:
        return msgspec.structs.replace(
            self.sampled.read(),
            prompt_logprobs={
                row.row: pack_logprobs(tensors) for row, tensors in self.prompt_logprobs
            },
            chunk_has_nan=() if self.chunk_has_nan is None else tuple(self.chunk_has_nan.tolist()),
            pooled=() if self.pooled is None else self.pooled.read(),
        )


class _Uploaded(NamedTuple):
    """A plan's arrays on the device, in the order in which they are uploaded: lengths in int32,
    everything that indexes in int64."""

    seq_lens: torch.Tensor
    num_new_tokens: torch.Tensor
    prefix_lens: torch.Tensor
    slots: torch.Tensor
    input_ids: torch.Tensor
    out_cache_loc: torch.Tensor
    token_slots: torch.Tensor
    positions: torch.Tensor
    state_indices: torch.Tensor
    sample_slots: torch.Tensor
    bounded_cache_locs: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> "_Uploaded":
        """What stands behind the others is of the bounded accounts, one each."""
        num_others = len(cls._fields) - 1
        return cls._make([*tensors[:num_others], tuple(tensors[num_others:])])


class StepInputBuilder:
    """Builds StepInputs and keeps req_to_token and what plans clear current. One per rank."""

    def __init__(
        self,
        req_to_token_pool: ReqToTokenPool,
        token_to_kv_pool: TokenToKVPool,
        device: torch.device,
    ) -> None:
        self._req_to_token_pool = req_to_token_pool
        self._token_to_kv_pool = token_to_kv_pool
        self._page_size = token_to_kv_pool.page_size
        self._page_offsets = torch.arange(self._page_size, dtype=torch.int32, device=device)
        self._device = device

    def build(self, plan: StepPlan, attn_backend: AttentionDispatch) -> StepInputs:
        """Apply what the plan changes in memory, then lay out its rows.

        input_ids may still hold LAST_SAMPLED_TOKEN: the sampler's state resolves it.
        """
        self.apply_memory_writes(plan)
        seq_lens = plan.prefix_lens + plan.num_new_tokens
        row_ends = np.cumsum(plan.num_new_tokens, dtype=np.int32)
        token_slots = np.repeat(plan.slots, plan.num_new_tokens)
        places = positions = np.arange(plan.num_tokens, dtype=np.int32) + np.repeat(
            plan.prefix_lens + plan.num_new_tokens - row_ends, plan.num_new_tokens
        )
        trees = PlanTrees.of(plan, places) if plan.has_trees else None
        if trees is not None:
            positions = trees.positions
        sampled = _sampled_tokens(row_ends, plan.samples)
        unfinished = row_ends[plan.samples == 0] - 1
        sample_slots = token_slots[sampled]
        device = _Uploaded.of(
            self._upload(
                seq_lens,
                plan.num_new_tokens,
                plan.prefix_lens,
                *_as_int64(
                    plan.slots,
                    plan.input_ids,
                    plan.out_cache_loc,
                    token_slots,
                    positions,
                    np.concatenate([sampled, unfinished]),
                    sample_slots,
                    *plan.bounded_cache_locs,
                ),
            )
        )
        written = device.positions if trees is None else self._upload(*_as_int64(places))[0]
        self._write_new_tokens(device, written)
        batch = _forward_batch(plan, seq_lens, device, attn_backend)
        if trees is not None:
            batch.visibility = Tree.of_parents(trees.rows, self._device)
        return StepInputs(
            batch,
            device.positions,
            device.token_slots,
            device.state_indices,
            device.sample_slots,
            sample_slots,
            positions[sampled] + 1,
            plan.samples[plan.samples > 0],
            plan.step_id,
            plan.masked_slots,
            RunDrafts.of(plan, trees) if plan.has_runs else None,
            trees,
        )

    def _write_new_tokens(self, device: _Uploaded, places: torch.Tensor) -> None:
        """Every account's table learns where the step's tokens go. places: int64 (num_tokens,), in
        their rows of it."""
        all_locs = device.out_cache_loc, *device.bounded_cache_locs
        for table, locs in zip(self._req_to_token_pool.own_tables, all_locs, strict=True):
            table[device.token_slots, places] = locs.int()

    def apply_memory_writes(self, plan: StepPlan) -> None:
        """Clear and move what the plan says, before its step and after all earlier ones."""
        if len(plan.cleared):
            self._token_to_kv_pool.clear_tokens(*self._upload(*_as_int64(plan.cleared)))
        for account, cleared in enumerate(plan.bounded_cleared, start=1):
            if len(cleared):
                indices = self._upload(*_as_int64(cleared))
                self._token_to_kv_pool.clear_bounded(account, *indices)
        if plan.table_writes:
            self._write_table(plan.table_writes)

    def _write_table(self, writes: Sequence[TableWrite]) -> None:
        """Page ids travel; they become cache indices on the device, a launch a write."""
        all_pages = np.concatenate([write.pages for write in writes])
        all_slots = np.concatenate([write.slots for write in writes])
        pages, slots = self._upload(all_pages, *_as_int64(all_slots))
        indices = (pages.unsqueeze(1) * self._page_size + self._page_offsets).view(-1)
        parts = zip(
            writes,
            torch.split(slots, [len(write.slots) for write in writes]),
            torch.split(indices, [len(write.pages) * self._page_size for write in writes]),
            strict=True,
        )
        for write, of_slots, cache_indices in parts:
            start = write.first_page * self._page_size
            self._req_to_token_pool.write(of_slots, start, cache_indices, write.account)

    def _upload(self, *arrays: npt.NDArray[Any]) -> list[torch.Tensor]:
        """Host arrays to device tensors of their dtypes, in one copy."""
        return upload(arrays, self._device)


def _forward_batch(
    plan: StepPlan, seq_lens: IntArray, device: _Uploaded, attn_backend: AttentionDispatch
) -> ForwardBatch:
    # Kernels of decode steps may store a row's keys while other rows attend.
    mode = ForwardMode.EXTEND if plan.has_repeats else plan.shape.mode
    return ForwardBatch(
        forward_mode=mode,
        batch_size=plan.batch_size,
        num_tokens=plan.num_tokens,
        input_ids=device.input_ids,
        positions=device.positions,
        req_pool_indices=device.slots,
        seq_lens=device.seq_lens,
        extend_seq_lens=device.num_new_tokens,
        extend_prefix_lens=device.prefix_lens,
        out_cache_loc=device.out_cache_loc,
        seq_lens_cpu=seq_lens,
        extend_seq_lens_cpu=plan.num_new_tokens,
        extend_prefix_lens_cpu=plan.prefix_lens,
        attn_backend=attn_backend,
        bounded_cache_locs=device.bounded_cache_locs,
    )


def _sampled_tokens(row_ends: IntArray, samples: IntArray) -> IntArray:
    """Indices of the new tokens that yield a next one each: the last samples[i] of row i."""
    stops = np.cumsum(samples, dtype=np.int32)
    own: IntArray = np.arange(stops[-1], dtype=np.int32) + np.repeat(row_ends - stops, samples)
    return own


def _as_int64(*arrays: IntArray) -> list[npt.NDArray[np.int64]]:
    """Widened on the host: on the device it would be a launch for each."""
    return [array.astype(np.int64) for array in arrays]
