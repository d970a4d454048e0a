"""Drafts of several places that end alike: a tree of what followed them, by how often it did."""

import numpy as np
import numpy.typing as npt

from workers.scheduler.plan import IntArray
from workers.speculation.tree_shape import Continuations, GrowingTree

MIN_BRANCH_PROBABILITY = 0.05
"""Of a draft and those before it, by counts."""
NO_TOKEN = -1


def grow_by_counts(tree: GrowingTree, continuations: IntArray) -> None:
    """continuations: int32 (places, n), the latest place last; NO_TOKEN behind the end of a text.
    Levels for which nothing is left stay away."""
    # Of each of the newest drafts, where it was followed by what.
    followed = [continuations]
    for column in range(continuations.shape[1]):
        parents, token_ids, logprobs, places = [], [], [], []
        known = zip(tree.newest, tree.newest_logprobs().tolist(), followed, strict=True)
        for parent, before, own in known:
            for token_id, logprob in _by_count(own[:, column]):
                if before + logprob >= np.log(MIN_BRANCH_PROBABILITY):
                    parents.append(parent)
                    token_ids.append(token_id)
                    logprobs.append(before + logprob)
                    places.append(own[own[:, column] == token_id])
        if not parents:
            return
        found = Continuations(np.array(parents, np.int32), np.array(token_ids), np.array(logprobs))
        followed = [places[index] for index in tree.grow(found).tolist()]


def _by_count(column: IntArray) -> list[tuple[int, float]]:
    """Tokens with the logarithms of their shares; of equally frequent ones the latest first."""
    latest_first: npt.NDArray[np.int32] = column[::-1]
    token_ids, firsts, counts = np.unique(latest_first, return_index=True, return_counts=True)
    shares = np.log(counts / len(column))
    order = np.argsort(firsts)
    every = zip(token_ids[order].tolist(), shares[order].tolist(), strict=True)
    return [(token_id, share) for token_id, share in every if token_id != NO_TOKEN]
