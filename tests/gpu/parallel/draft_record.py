"""What a rank drafted, written where a test reads it: `PID.json`, when the rank is closed."""

import json
import os
import time
from pathlib import Path
from typing import NamedTuple

from workers.graphs.draft_graphs import DraftGraphs
from workers.runner.cuda_rank_drafts_runner import CudaRankDraftsRunner

WRITTEN_S = 20.0


class DraftRecord:
    """Of the one rank of this process, from here on.

    history: of the host's tokens, int (num_slots, max_context_len), on rank 0 once it is there: the
    texts that drafts go on from.
    """

    def __init__(self, folder: Path) -> None:
        self.history = None
        self._folder = folder
        self._steps, self._texts, self._num_replays = [], [], 0
        self._is_captured = False
        own_run, own_make = DraftGraphs.run, CudaRankDraftsRunner._make_drafts
        own_close = CudaRankDraftsRunner.close

        def run(graphs, step):
            self._num_replays += 1
            self._is_captured = graphs.num_captured == graphs.num_shapes
            return own_run(graphs, step)

        def make_drafts(runner, step):
            own_make(runner, step)
            self._take(step)

        def close(runner):
            self._write()
            own_close(runner)

        DraftGraphs.run = run
        CudaRankDraftsRunner._make_drafts = make_drafts
        CudaRankDraftsRunner.close = close

    def _take(self, step) -> None:
        """Waits for the device."""
        runs = step.runs
        rows = zip(runs.slots, runs.prefix_lens, runs.num_drafts, runs.firsts, strict=True)
        for slot, prefix_len, num_drafts, first in rows:
            drafts = step.ids[first + 1 : first + 1 + num_drafts].tolist()
            self._steps.append([step.plan.step_id, int(slot), int(prefix_len), drafts])
            if self.history is not None:
                text = self.history.token_ids[slot, : prefix_len + 1].tolist()
                self._texts.append([text, drafts])

    def _write(self) -> None:
        written = self._folder / f"{os.getpid()}.writing"
        told = {"steps": self._steps, "texts": self._texts}
        told |= {"num_replays": self._num_replays, "is_captured": self._is_captured}
        written.write_text(json.dumps(told))
        written.rename(self._folder / f"{os.getpid()}.json")


class Told(NamedTuple):
    """texts: rank 0's, [text, drafts] each. num_replays: of graphs of drafts, the fewest of any
    rank; is_captured: whether all were there in the end on all ranks."""

    texts: list
    num_replays: int
    is_captured: bool


def drafts_of_ranks(folder: Path, num_ranks: int) -> Told:
    """Checks that all ranks drafted the same to the token, step by step."""
    deadline_s = time.monotonic() + WRITTEN_S
    while len(files := list(folder.glob("*.json"))) < num_ranks:
        assert time.monotonic() < deadline_s, f"{len(files)} of {num_ranks} ranks told of drafts"
        time.sleep(0.1)
    ranks = [json.loads(file.read_text()) for file in files]
    assert all(rank["steps"] == ranks[0]["steps"] for rank in ranks)
    assert len(ranks[0]["steps"]) > 20
    (texts,) = [rank["texts"] for rank in ranks if rank["texts"]]
    captured = all(rank["is_captured"] for rank in ranks)
    return Told(texts, min(rank["num_replays"] for rank in ranks), captured)
