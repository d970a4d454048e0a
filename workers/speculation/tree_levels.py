"""Passes over trees of one shape that grow level by level: what is the same whatever they hold."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from workers.sampling.transfer import upload


@dataclass(frozen=True, slots=True)
class TreeLevel:
    """A pass over the first num_tokens tokens of some rows, of which num_newest are of the last
    level. Of as many rows as there may be, the first of them for fewer: newest, int64 (rows *
    num_newest,), where these stand among all rows' tokens; starts, int32 (rows,), where each row's
    cells begin, one for each pair of tokens; num_new, int32 (rows,), num_tokens each."""

    num_tokens: int
    num_newest: int
    newest: torch.Tensor
    starts: torch.Tensor
    num_new: torch.Tensor


def tree_levels(widths: Sequence[int], max_rows: int, device: torch.device) -> list[TreeLevel]:
    """Of trees of widths[i] drafts at depth i + 1: a pass behind which each level grows, and one
    over the whole tree."""
    sizes = [*zip(accumulate(widths, initial=1), (1, *widths), strict=True)]
    return [_level(*size, max_rows, device) for size in sizes]


def _level(num_tokens: int, num_newest: int, max_rows: int, device: torch.device) -> TreeLevel:
    rows = np.arange(max_rows, dtype=np.int64)
    ends = (rows + 1)[:, None] * num_tokens
    newest = (ends - num_newest + np.arange(num_newest)).reshape(-1)
    starts = (rows * num_tokens**2).astype(np.int32)
    num_new = np.full(max_rows, num_tokens, dtype=np.int32)
    return TreeLevel(num_tokens, num_newest, *upload([newest, starts, num_new], device))
