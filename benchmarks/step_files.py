"""How many files a reader has to open to follow one decode step on a CPU.

    python -m benchmarks.step_files [--requests N] [--steps N] [--temperature T]

Runs the built-in model until all requests decode, and then, under a profiler in all threads, that
many steps. Prints which files of `attention` and `workers` they entered, by thread and in the order
in which they were entered first, with calls a step. A file counts once. One that a step only names,
for a type or a constant, is not entered, and neither is code that a library generates for a class.
Imports nothing but the engine and its parameters, so that an older tree can be counted as well:
PYTHONPATH=TREE python benchmarks/step_files.py.
"""

import argparse
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, get_type_hints

import torch

import workers
from workers import Engine
from workers.config import EngineConfig
from workers.sampling.params import SamplingParams

ROOT = Path(workers.__file__).parents[1]
PACKAGES = ("attention", "workers")
PROMPT_TOKENS = 8
# Steps before counting: all prefills, and what only a first decode step does.
NUM_WARM_STEPS = 24
# No call for so long: the step in flight has ended.
QUIET_S = 0.1
COMPREHENSIONS = frozenset(("<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>"))


class CallCounter:
    """A profile function for every thread: calls of this project's functions, by thread and file.

    calls: of each thread, files in the order in which it entered them first.
    """

    def __init__(self) -> None:
        self.calls: dict[int, Counter[str]] = {}
        self._files: dict[CodeType, str | None] = {}

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event != "call":
            return
        code = frame.f_code
        if code not in self._files:
            self._files[code] = _file_of(code)
        file = self._files[code]
        if file is not None:
            self.calls.setdefault(threading.get_ident(), Counter())[file] += 1

    @property
    def num_calls(self) -> int:
        return sum(calls.total() for calls in self.calls.values())

    def wait_until_quiet(self) -> None:
        """No thread but this one is inside a step afterwards."""
        num_before = -1
        while num_before != self.num_calls:
            num_before = self.num_calls
            time.sleep(QUIET_S)


def _file_of(code: CodeType) -> str | None:
    """Relative to the tree; None for a file of somebody else and for a part of a function."""
    path = Path(code.co_filename)
    if code.co_name in COMPREHENSIONS or not path.is_relative_to(ROOT):
        return None
    relative = path.relative_to(ROOT)
    return str(relative) if relative.parts[0] in PACKAGES else None


def count(num_requests: int, num_steps: int, temperature: float) -> list[Counter[str]]:
    """Calls by file of num_steps decode steps, by thread, the engine's first."""
    counter = CallCounter()
    # Before the engine starts any thread.
    threading.setprofile(counter)
    engine = Engine.from_config(EngineConfig(device="cpu", num_cpu_threads=1))
    try:
        for request in _requests(num_requests, temperature, NUM_WARM_STEPS + num_steps + 8):
            engine.submit(request)
        for _ in range(NUM_WARM_STEPS):
            engine.step()
        counter.wait_until_quiet()
        counter.calls.clear()
        _profiled(engine.step, num_steps, counter)
        counter.wait_until_quiet()
        calls = [calls.copy() for calls in counter.calls.values()]
    finally:
        engine.close()
        threading.setprofile(None)  # type: ignore[arg-type]
    return calls


def _profiled(step: Callable[[], Any], num_steps: int, counter: CallCounter) -> None:
    """num_steps steps with this thread's calls counted too."""
    sys.setprofile(counter)
    try:
        for _ in range(num_steps):
            step()
    finally:
        sys.setprofile(None)


def _requests(num_requests: int, temperature: float, max_tokens: int) -> list[Any]:
    """Prompts without a common beginning, that all end together."""
    # The class that submit takes, wherever it lives.
    request_class = get_type_hints(Engine.submit)["request"]
    sampling = SamplingParams(
        temperature=temperature, seed=0, max_tokens=max_tokens, ignore_eos=True
    )
    return [
        request_class(f"request-{index}", [index + 1] * PROMPT_TOKENS, sampling)
        for index in range(num_requests)
    ]


def report(calls: Sequence[Counter[str]], num_steps: int) -> str:
    files = set().union(*calls)
    lines = [f"{len(files)} files: {', '.join(_share(files, package) for package in PACKAGES)}"]
    for name, one in zip(("the engine's thread", "the step's thread"), calls, strict=True):
        lines += ["", f"{name}, calls a step"]
        lines += [f"{number / num_steps:8.1f}  {file}" for file, number in one.items()]
    return "\n".join(lines)


def _share(files: set[str], package: str) -> str:
    return f"{sum(file.startswith(package + '/') for file in files)} of {package}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=4, help="rows of each step")
    parser.add_argument("--steps", type=int, default=64, help="decode steps counted")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: greedy")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    calls = count(arguments.requests, arguments.steps, arguments.temperature)
    print(report(calls, arguments.steps))


if __name__ == "__main__":
    main()
