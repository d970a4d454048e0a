"""Where the drafts of a plan stand whose rows are trees: depths, paths and places.

A row's new tokens then are nodes: the token sampled last, which is its root, and drafts, each
behind its parent. Plain numbers, no tensor. Every new token of such a step yields a sample, so that
a token's place in the step is its sample's, too.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from workers.scheduler.plan import IntArray, StepPlan

_MAX_KEPT_STRUCTURES = 16
"""More than there are steps under way."""


@dataclass(frozen=True, slots=True)
class PlanTrees:
    """Of a step's new tokens, host arrays; num_tokens long but rows.

    rows: the parents of each row, as in StepPlan. paths: int64 (num_tokens, deepest + 1), the
    tokens of the step from the root of a token's row to itself, then itself again. depths: int32,
    how many of its row stand before a token on its path. places: int32, where in its row, of cached
    and new tokens, each is written. positions: int32, where each stands in the text.
    """

    rows: tuple[IntArray, ...]
    paths: npt.NDArray[np.int64]
    depths: IntArray
    places: IntArray
    positions: IntArray

    @classmethod
    def of(cls, plan: StepPlan, places: IntArray) -> "PlanTrees":
        """Of a plan with trees."""
        return cls._of(plan.parents, plan.num_new_tokens, plan.prefix_lens, places)

    @classmethod
    def of_samples(cls, parents: IntArray, num_samples: IntArray) -> "PlanTrees":
        """Of rows that some of a plan's tokens are left of, as if no others were before them.
        parents: of these, as in StepPlan."""
        ends = np.cumsum(num_samples, dtype=np.int32)
        places = np.arange(len(parents), dtype=np.int32) - np.repeat(
            ends - num_samples, num_samples
        )
        return cls._of(parents, num_samples, np.zeros_like(num_samples), places)

    @classmethod
    def _of(
        cls, of_rows: IntArray, num_new: IntArray, prefix_lens: IntArray, places: IntArray
    ) -> "PlanTrees":
        keys = (one.astype(np.int32, copy=False).tobytes() for one in (of_rows, num_new))
        depths, paths = _structure(*keys)
        rows = tuple(np.split(of_rows, np.cumsum(num_new)[:-1]))
        positions = np.repeat(prefix_lens, num_new) + depths
        return cls(rows, paths, depths, places, positions)

    @property
    def parents(self) -> npt.NDArray[np.int64]:
        """Which token of the step each stands behind; a root itself. int64 (num_tokens,)."""
        before = np.maximum(self.depths - 1, 0)
        return self.paths[np.arange(len(before)), before]


@lru_cache(maxsize=_MAX_KEPT_STRUCTURES)
def _structure(of_rows: bytes, num_new: bytes) -> tuple[IntArray, npt.NDArray[np.int64]]:
    """depths and paths of PlanTrees, read only. of_rows, num_new: bytes of int32 arrays. Kept, as
    steps of the same rows mostly have trees of the same shapes."""
    parents_in_rows, lens = (np.frombuffer(own, dtype=np.int32) for own in (of_rows, num_new))
    starts = np.repeat(np.cumsum(lens, dtype=np.int64) - lens, lens)
    own = np.arange(len(parents_in_rows))
    parents = np.where(parents_in_rows < 0, own, starts + parents_in_rows)
    depths = _depths(parents)
    paths = _paths(parents, depths)
    for kept in (depths, paths):
        kept.setflags(write=False)
    return depths, paths


def depths_of(parents: IntArray) -> IntArray:
    """Of one row's tokens, its parents as in StepPlan."""
    return _depths(np.where(parents < 0, np.arange(len(parents)), parents))


def _depths(parents: npt.NDArray[np.int64]) -> IntArray:
    """parents: of a root itself."""
    depths = np.zeros(len(parents), dtype=np.int32)
    at = np.arange(len(parents))
    while (parents[at] != at).any():
        depths += parents[at] != at
        at = parents[at]
    return depths


def _paths(parents: npt.NDArray[np.int64], depths: IntArray) -> npt.NDArray[np.int64]:
    """From the deepest token of each path upwards."""
    own = np.arange(len(parents))
    paths = np.repeat(own[:, None], int(depths.max()) + 1, axis=1)
    at, left = own, depths.copy()
    while (left > 0).any():
        at = np.where(left > 0, parents[at], at)
        left = np.maximum(left - 1, 0)
        paths[own, left] = at
    return paths
