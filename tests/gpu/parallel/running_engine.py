"""A test's side of engine_process: starts it, gives it tasks, and leaves nothing of it behind."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import contextmanager, suppress

from tests.gpu.parallel.gpu_locks import own_gpus

RUN_S = 150.0
"""Of one engine, captures included; it has its GPUs for itself."""
END_S = 30.0


class RunningEngine:
    """An engine that is ready. process: its rank 0; errors: the file of its standard error."""

    def __init__(self, process, errors):
        self.process = process
        self._errors = errors

    def generate(self, prompts, sampling, rounds=1, captures=False, adapters=()):
        """The tokens of every round. captures: all graphs beforehand. adapters: of each prompt, a
        folder or None; empty: of none."""
        self.begin(prompts, sampling, rounds, captures, adapters)
        return [json.loads(self.read_line()) for _ in range(rounds)]

    def counts(self):
        """So far: "drafts" of all requests, those that were "right", and "decode_replays", steps
        of rank 0 that replayed a decode graph."""
        self.tell({"counts": True})
        return json.loads(self.read_line())

    def begin(self, prompts, sampling, rounds, captures=False, adapters=()):
        told = {"prompts": prompts, "sampling": sampling, "rounds": rounds, "captures": captures}
        self.tell({**told, "adapters": list(adapters)})

    def tell(self, told):
        try:
            self.process.stdin.write(json.dumps(told) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise AssertionError(f"the engine ended:\n{self.said()}") from None

    def read_line(self):
        """Raises AssertionError, with what it said, if the engine has ended."""
        line = self.process.stdout.readline()
        if not line:
            raise AssertionError(f"the engine ended:\n{self.said()}")
        return line

    def said(self):
        self._errors.seek(0)
        return self._errors.read()

    def end(self):
        """It comes to its end by itself once there are no more tasks."""
        self.process.stdin.close()
        assert self.process.wait(END_S) == 0, self.said()


@contextmanager
def running(config, one_shot_bytes=None, drafts_folder=None):
    """An engine of config["tp_size"] ranks; whatever becomes of it, it is killed with all its ranks
    in the end, and RUN_S after it got its GPUs. one_shot_bytes, drafts_folder: see asked_ranks."""
    with (
        tempfile.TemporaryFile("w+") as errors,
        started(errors) as process,
        own_gpus(config["tp_size"]) as gpus,
    ):
        timer = threading.Timer(RUN_S, kill_group, (process.pid,))
        timer.start()
        try:
            engine = RunningEngine(process, errors)
            drafts = None if drafts_folder is None else str(drafts_folder)
            asked = {"one_shot_bytes": one_shot_bytes, "drafts_folder": drafts}
            told = {"config": config, "gpus": gpus, "asked": asked}
            engine.tell({**told, "dump_s": RUN_S - 10.0})
            assert engine.read_line() == "ready\n"
            yield engine
        finally:
            timer.cancel()
            # Of the whole group, before others get the GPUs: a rank may outlive its leader.
            kill_group(process.pid)
            process.wait()


@contextmanager
def started(errors):
    """A process that imports what an engine needs."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.gpu.parallel.engine_process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        start_new_session=True,
        # It learns after its imports which GPUs are its own: nothing may ask CUDA before that.
        env={**os.environ, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"},
    )
    try:
        yield process
    finally:
        kill_group(process.pid)
        process.wait()
        process.stdout.close()
        with suppress(BrokenPipeError):
            process.stdin.close()


def kill_group(group):
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return
