"""Which keys of its row a step's new token sees, beside what windows and chunks hide.

One value a step, of one kind. Where a row's tokens do not stand one behind the other, as drafts of
a tree or items that share a prefix, windows and chunks count positions (ForwardBatch.positions),
not places. Knows no kernel and no pool. A tensor here is on the step's device; constructors from
host data check what they are given, so that no step waits for its device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch


class VisibilityKind(StrEnum):
    """What a backend declares and a model needs. The value is the kind's name in messages."""

    CAUSAL = "causal visibility"
    TREE = "masks among new tokens (draft trees)"
    ITEMS = "items that share a prefix (multi-item scoring)"
    EVERYTHING = "visibility of later tokens (encoders)"


CAUSAL_ONLY = frozenset({VisibilityKind.CAUSAL})


@dataclass(frozen=True, slots=True)
class Causal:
    """A token sees those of its row up to itself."""

    kind: ClassVar[VisibilityKind] = VisibilityKind.CAUSAL


CAUSAL = Causal()


@dataclass(frozen=True, slots=True)
class Everything:
    """A token sees every token of its row, later ones too. A window of n then lets it see those
    that stand fewer than n positions away, on both sides; a chunk all that stand in it."""

    kind: ClassVar[VisibilityKind] = VisibilityKind.EVERYTHING


@dataclass(frozen=True, slots=True, eq=False)
class Tree:
    """A token sees its row's cached prefix, and those of the row's new tokens that the mask says.

    mask: bool (sum over rows of n * n,), row after row, n being the row's new tokens: cell (i, j),
    row-major, says whether new token i sees new token j. Every token sees itself. starts: int32
    (bs,), where each row's cells begin. A row's cached tokens stand at their places, the first new
    one behind them, no new one before it.
    """

    mask: torch.Tensor
    starts: torch.Tensor
    kind: ClassVar[VisibilityKind] = VisibilityKind.TREE

    @classmethod
    def of_masks(cls, masks: Sequence[npt.NDArray[np.bool_]], device: torch.device) -> Tree:
        """masks: (n, n) of each row, in order. ValueError where one is not square or some token
        does not see itself."""
        for mask in masks:
            if mask.ndim != 2 or mask.shape[0] != mask.shape[1] or not mask.diagonal().all():
                raise ValueError(f"a tree's mask is square and true on its diagonal: {mask.shape}")
        cells = np.concatenate([np.zeros(0, np.bool_), *(mask.reshape(-1) for mask in masks)])
        sizes = np.array([mask.size for mask in masks], dtype=np.int32)
        return cls(
            _on_device(cells, device),
            _on_device(np.cumsum(sizes, dtype=np.int32) - sizes, device),
        )

    @classmethod
    def of_parents(cls, parents: Sequence[npt.NDArray[np.int32]], device: torch.device) -> Tree:
        """parents: (n,) of each row, a new token's parent among those before it, -1 for the root's:
        a token sees its ancestors and itself. ValueError where a parent does not come before."""
        return cls.of_masks([_ancestors(row) for row in parents], device)


@dataclass(frozen=True, slots=True, eq=False)
class Items:
    """Several items behind one prefix: a token of an item sees the prefix and its own item up to
    itself, no other item; a token of the prefix sees what comes before it.

    shared_keys: int32 (num_tokens,), how many of its row's first tokens a new token sees anyway.
    first_own: int32 (num_tokens,), at which place of its row its own item begins; it sees all from
    there up to itself. Both are 0 for tokens of a prefix. A row may come in several steps, cut
    anywhere. Tokens of a prefix stand at their places, those of an item one behind the other.
    """

    shared_keys: torch.Tensor
    first_own: torch.Tensor
    kind: ClassVar[VisibilityKind] = VisibilityKind.ITEMS

    @classmethod
    def of_starts(
        cls,
        starts: Sequence[Sequence[int]],
        prefix_lens: npt.NDArray[np.int32],
        new_lens: npt.NDArray[np.int32],
        device: torch.device,
    ) -> Items:
        """starts: of each row the ascending places at which its items begin, the first of them
        ending the shared prefix; none for a row without items. prefix_lens, new_lens: int32 (bs,),
        of the batch. ValueError where starts do not ascend."""
        columns = [np.zeros((2, 0), dtype=np.int32)]
        for row, prefix_len, new_len in zip(starts, prefix_lens, new_lens, strict=True):
            borders = np.array(row, dtype=np.int32)
            if (np.diff(borders, prepend=-1) <= 0).any():
                raise ValueError(f"items begin one behind the other: {row}")
            places = np.arange(prefix_len, prefix_len + new_len, dtype=np.int32)
            item = np.searchsorted(borders, places, side="right")
            own = np.concatenate([np.zeros(1, np.int32), borders])[item]
            shared = np.where(item > 0, borders[:1].sum(), 0).astype(np.int32)
            columns.append(np.stack([shared, own]))
        shared_keys, first_own = torch.from_numpy(np.concatenate(columns, axis=1)).to(device)
        return cls(shared_keys, first_own)


Visibility = Causal | Tree | Items | Everything


def _on_device(array: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """By a copy that the host does not wait for."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def _ancestors(parents: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
    mask = np.eye(len(parents), dtype=np.bool_)
    for token, parent in enumerate(parents.tolist()):
        if not -1 <= parent < token:
            raise ValueError(f"the parent of draft {token} is {parent}, which is not before it")
        if parent >= 0:
            mask[token] |= mask[parent]
    return mask
