"""Drafts by the longest suffix that occurred before, in the request itself or in recent outputs of
others, as many as the match is long for.

After SuffixDecoding (Oliaro et al., 2024). Where many places end alike, each next draft is what
followed most of them, while it is likely enough by their counts. There is no tree to keep: a scan
for the last token, narrowed token by token, finds the same places, and costs a prompt nothing when
it comes.
"""

from collections.abc import Sequence

import numpy as np
import torch

from workers.scheduler.plan import AdmittedRequest, IntArray
from workers.speculation.history import TokenHistory
from workers.speculation.proposer import DraftRows, Drafts, ObservedStep
from workers.speculation.recent_outputs import RecentOutputs
from workers.speculation.suffix_tree import NO_TOKEN, grow_by_counts
from workers.speculation.tree_shape import growing_trees, joined

MAX_MATCH = 16
"""Places are compared by so many tokens."""
DRAFTS_PER_MATCHED_TOKEN = 2
MIN_PROBABILITY = 0.25
"""Of a draft and those before it, by counts of places that end alike."""
MAX_CANDIDATES = 2048
"""Of places that end with the same token the latest are looked at: a text may be one token many
times over, and nobody waits for that."""
MAX_PLACES = 64
"""Of places that match equally the latest count."""


class SuffixProposer:
    """On the host. What it learns of a request serves those of the same salt only."""

    def __init__(self, history: TokenHistory, tree: tuple[int, ...] = ()) -> None:
        """history: on the CPU. tree: drafts at each depth, none for chains."""
        self._history: IntArray = history.token_ids.numpy()
        self._tree = tree
        num_slots = len(self._history)
        self._salts = [""] * num_slots
        self._num_known = np.zeros(num_slots, dtype=np.int64)
        self._lens = np.zeros(num_slots, dtype=np.int64)
        self._outputs = RecentOutputs()

    def admit(self, requests: Sequence[AdmittedRequest]) -> None:
        """What was said in the slots since they were taken joins what others may repeat: a request
        that goes on in another slot brings the rest. A step that is launched again finds it taken.
        """
        for request in requests:
            slot = request.slot
            start, stop = int(self._num_known[slot]), int(self._lens[slot])
            self._outputs.add(self._salts[slot], self._history[slot, start:stop])
            self._salts[slot] = request.cache_salt
            self._num_known[slot] = len(request.known_ids)
            self._lens[slot] = 0

    def observe(self, step: ObservedStep) -> None:
        """Only how long texts have become."""
        held = step.prefix_lens + step.num_held.numpy()
        self._lens[step.slots] = held + (step.next_ids.numpy() != NO_TOKEN)

    def propose(self, rows: DraftRows) -> Drafts:
        """See Proposer."""
        if self._tree and rows.may_branch is not None and rows.may_branch.any():
            return self._trees(rows)
        token_ids = np.zeros((len(rows.slots), rows.width), dtype=np.int64)
        num_drafts = np.zeros(len(rows.slots), dtype=np.int32)
        for row, (slot, length, most) in enumerate(
            zip(rows.slots.tolist(), rows.lens.tolist(), rows.max_drafts.tolist(), strict=True)
        ):
            drafts = voted(self._continuations(slot, length, most))
            token_ids[row, : len(drafts)] = drafts
            num_drafts[row] = len(drafts)
        return Drafts(torch.from_numpy(token_ids), num_drafts)

    def _trees(self, rows: DraftRows) -> Drafts:
        trees = growing_trees(self._tree, rows)
        for tree, slot, length in zip(trees, rows.slots.tolist(), rows.lens.tolist(), strict=True):
            grow_by_counts(tree, self._continuations(slot, length, len(tree.widths)))
        return joined(trees, rows.width)

    def _continuations(self, slot: int, length: int, most: int) -> IntArray:
        """Of all places that end like the text, int32 (places, n): n at most most, 0 for none."""
        own = self._history[slot, :length]
        tail = own[: -MAX_MATCH - 1 : -1]
        ends, matched = longest_match(own[:-1], tail)
        others = self._outputs.tokens(self._salts[slot])
        other_ends, other_matched = longest_match(others, tail)
        longest = max(matched, other_matched)
        columns = np.arange(min(most, DRAFTS_PER_MATCHED_TOKEN * longest))
        if not len(columns):
            return np.zeros((1, 0), dtype=np.int32)
        if matched == longest:
            starts = ends[-MAX_PLACES:, None]
            # A place near the end is followed by less than is wanted: it repeats itself.
            found: IntArray = own[starts + 1 + columns % (length - 1 - starts)]
        else:
            places = other_ends[-MAX_PLACES:, None] + 1 + columns
            found = others[np.minimum(places, len(others) - 1)]
        return found


def longest_match(tokens: IntArray, tail: IntArray) -> tuple[IntArray, int]:
    """Where in tokens, int32 (n,), the places end that have the most in common with a text's end,
    in order, and how many tokens that is; 0 where there is no place. tail: the text's last tokens,
    the very last one first."""
    ends: IntArray = np.flatnonzero(tokens == tail[0])[-MAX_CANDIDATES:].astype(np.int32)
    if not len(ends):
        return ends, 0
    for distance in range(1, len(tail)):
        longer = ends[ends >= distance]
        longer = longer[tokens[longer - distance] == tail[distance]]
        if not len(longer):
            return ends, distance
        ends = longer
    return ends, len(tail)


def voted(continuations: IntArray) -> list[int]:
    """What most places go on with, as long as that is likely enough. continuations: int32 (places,
    n), the latest place last; NO_TOKEN behind the end of a text."""
    drafts: list[int] = []
    probability = 1.0
    for column in range(continuations.shape[1]):
        found = continuations[:, column]
        token_id = most_frequent(found)
        agrees = found == token_id
        probability *= float(agrees.mean())
        if token_id == NO_TOKEN or probability < MIN_PROBABILITY:
            break
        drafts.append(token_id)
        continuations = continuations[agrees]
    return drafts


def most_frequent(token_ids: IntArray) -> int:
    """Of equally frequent ones the one that comes last. token_ids: int32 (n,), n at least 1."""
    latest = token_ids[-1]
    if 2 * int((token_ids == latest).sum()) >= len(token_ids):
        return int(latest)
    values, counts = np.unique(token_ids, return_counts=True)
    best = values[counts == counts.max()]
    return int(token_ids[np.flatnonzero(np.isin(token_ids, best))[-1]])
