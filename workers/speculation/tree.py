"""Drafts of which several may stand in one place: those on one path from the root hold."""

from dataclasses import replace
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from workers.sampling.logprobs import LogprobTensors, SampledLogprobs
from workers.sampling.state import SampledTokens
from workers.sampling.transfer import upload
from workers.scheduler.plan import IntArray, StepResult
from workers.scheduler.plan_tree import PlanTrees


class HeldPaths(NamedTuple):
    """run_lens: int64 (n,), how many samples of each row hold. order: int64 (sum of num_samples,),
    the samples of the step row by row, in each those that hold first, from the root on."""

    run_lens: torch.Tensor
    order: torch.Tensor


class TreeVerifier:
    """On the host. Drafts behind one token differ, so one of them is right at most: what holds is a
    path."""

    def accept(
        self,
        token_ids: torch.Tensor,
        input_ids: torch.Tensor,
        num_samples: IntArray,
        trees: PlanTrees,
    ) -> HeldPaths:
        """Arguments as in Verifier, on the CPU; of a step whose new tokens are all sampled behind.

        In NumPy: of the few tokens of a step, operations of torch take several times as long.
        """
        is_expected = token_ids.numpy()[trees.parents] == input_ids.numpy()
        is_right = (trees.depths == 0) | is_expected
        holds = is_right[trees.paths].all(axis=1)
        starts = np.cumsum(num_samples) - num_samples
        run_lens = np.add.reduceat(holds, starts, dtype=np.int64)
        rows = np.repeat(np.arange(len(num_samples)), num_samples)
        order = np.argsort(2 * rows + ~holds, kind="stable")
        return HeldPaths(torch.from_numpy(run_lens), torch.from_numpy(order))


def held_paths(
    token_ids: torch.Tensor,
    input_ids: torch.Tensor,
    num_samples: IntArray,
    parents: torch.Tensor,
    depths: IntArray,
) -> HeldPaths:
    """As TreeVerifier.accept, on any device, for which nothing waits.

    parents: int64 (sum of num_samples,), which token of the step each stands behind, a root itself.
    depths: as in PlanTrees.
    """
    of_rows = np.repeat(np.arange(len(num_samples)), num_samples)
    rows, on_device = upload([of_rows, depths], token_ids.device)
    is_right = (on_device == 0) | (token_ids[parents] == input_ids)
    holds = is_right
    for _ in range(int(depths.max())):
        holds = is_right & holds[parents]
    run_lens = torch.zeros(len(num_samples), dtype=torch.int64, device=token_ids.device)
    run_lens.scatter_add_(0, rows, holds.long())
    return HeldPaths(run_lens, torch.argsort(2 * rows + (~holds).long(), stable=True))


def in_order(sampled: SampledTokens, order: torch.Tensor) -> SampledTokens:
    """order: int64 (n,), which sample comes where; samples stay with their slot's others."""
    logprobs = None if sampled.logprobs is None else _logprobs_in_order(sampled.logprobs, order)
    return SampledTokens(sampled.token_ids[order], sampled.has_nan[order], logprobs)


def in_path_order(result: StepResult, order: torch.Tensor) -> StepResult:
    """As in_order, of what a step brought to the host, which has all samples."""
    logprobs = tuple(result.logprobs[index] for index in order.tolist()) if result.logprobs else ()
    return msgspec.structs.replace(
        result, token_ids=result.token_ids[order.numpy()], logprobs=logprobs
    )


def _logprobs_in_order(logprobs: SampledLogprobs, order: torch.Tensor) -> SampledLogprobs:
    """Whether a sample has any depends on its slot only."""
    has_own = logprobs.num_top >= 0
    own = torch.from_numpy(np.cumsum(has_own) - 1).to(order.device)
    rows = own[order[torch.from_numpy(np.flatnonzero(has_own)).to(order.device)]]
    old = logprobs.tensors
    tensors = LogprobTensors(
        old.logprobs[rows], old.ranks[rows], old.top_token_ids[rows], old.top_logprobs[rows]
    )
    return replace(logprobs, tensors=tensors)
