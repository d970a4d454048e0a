"""One engine in a process of its own: `python -m tests.gpu.parallel.engine_process`.

A process belongs to one group of ranks and ends with any of them, so that tests run it from
outside. It reads lines of JSON: first what to be, then one task after the other until there are no
more. Prints "ready" when the engine is, then the tokens of every round as a line of JSON, or counts
where a task asks for these. It and its ranks are one process group, which ends with the process
that started it: nothing is left on a GPU. Imports are done before the first line is read, which may
wait for the GPUs to be free.
"""

import faulthandler
import json
import logging
import os
import signal
import sys
import threading
import time
from functools import partial
from pathlib import Path

import msgspec

from tests.gpu.parallel.asked_ranks import Asked, asked_followers
from workers.adapters.folder import adapter_at
from workers.config import EngineConfig
from workers.graphs.decode_graphs import DecodeGraphs
from workers.parallel.local_engine import build_local_engine
from workers.parallel.tp_engine import build_tp_engine
from workers.sampling.params import SamplingParams

PARENT_POLL_S = 0.5


def end_with(parent: int) -> None:
    """End this process group when the process that leads to it has gone."""
    while os.getppid() == parent:
        time.sleep(PARENT_POLL_S)
    os.killpg(0, signal.SIGKILL)


def build_engine(config, asked):
    """asked: see asked_ranks."""
    record = asked.of_this_process()
    if asked == Asked():
        return build_local_engine(config, lambda done, total: None)
    followers = asked_followers(asked)
    lost = partial(print, "lost rank", file=sys.stderr)
    engine = build_tp_engine(config, followers, lost, lambda step: None, lambda done, total: None)
    if record is not None:
        record.history = engine._executor._runs._history
    return engine


class DecodeReplays:
    """How many decode steps of this process's rank replayed a graph."""

    def __init__(self):
        self.num = 0
        self._replay = DecodeGraphs.replay
        DecodeGraphs.replay = lambda graphs, plan: self._counted(graphs, plan)

    def _counted(self, graphs, plan):
        self.num += 1
        return self._replay(graphs, plan)


def counts_of(engine, replays):
    stats = engine.stats()
    drafts = {"drafts": stats.num_draft_tokens, "right": stats.num_accepted_draft_tokens}
    return {**drafts, "decode_replays": replays.num}


def run(engine, task):
    """task: prompts, sampling, rounds, whether all graphs are captured before, and adapters, a
    folder or None for each of the prompts."""
    while task["captures"] and engine.prepare_while_idle():
        pass
    sampling = msgspec.convert(task["sampling"], list[SamplingParams], str_keys=True)
    info = engine.info.adapters
    refs = [one and adapter_at(one, Path(one), info) for one in task["adapters"]]
    for _ in range(task["rounds"]):
        results = engine.generate(task["prompts"], sampling, adapters=refs)
        engine.check_integrity()
        print(json.dumps([result.token_ids for result in results]), flush=True)


def main() -> None:
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    told = json.loads(sys.stdin.readline())
    # Set when the GPUs are this process's: from then on it must come to its end.
    os.environ["CUDA_VISIBLE_DEVICES"] = told["gpus"]
    faulthandler.dump_traceback_later(told["dump_s"])
    replays = DecodeReplays()
    engine = build_engine(EngineConfig(**told["config"]), Asked(**told["asked"]))
    print("ready", flush=True)
    for line in sys.stdin:
        task = json.loads(line)
        if "counts" in task:
            print(json.dumps(counts_of(engine, replays)), flush=True)
        else:
            run(engine, task)
    engine.close()


if __name__ == "__main__":
    main()
