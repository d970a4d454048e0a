"""The steps of a throughput row: how many there are of each size, and how long they take.

    python3 -m benchmarks.h200.throughput_steps CONFIG_JSON [--workload brief] [--backend NAME]

Runs the Batch rows of a workload, each after the usual warm-up, and prints their seconds; then, of
decode steps by their rows and of steps with prompts by their tokens: number, milliseconds (median,
longest), seconds together. As many requests run as fit where hardly a decode step has fewer rows.
"""

import argparse
import statistics
from collections import defaultdict
from collections.abc import Iterable

from benchmarks.h200.driver import (
    MAX_CONTEXT_LEN,
    MAX_RUNNING_REQUESTS,
    MEMORY_FRACTION,
    job_of,
    make_parser,
)
from benchmarks.h200.workloads import VOCAB_SIZE, WORKLOADS, Batch, WorkloadRunner
from workers.config import EngineConfig
from workers.engine.engine import Engine
from workers.engine.observer import StepRecord
from workers.sampling.params import SamplingParams

ROWS_A_LINE = 64
PROMPT_TOKENS_A_LINE = 2048


def build(arguments: argparse.Namespace, steps: list[StepRecord]) -> Engine:
    with job_of(arguments).model_folder() as folder:
        config = EngineConfig(
            model=folder,
            load_format="dummy",
            max_context_len=MAX_CONTEXT_LEN,
            gpu_memory_fraction=MEMORY_FRACTION,
            max_running_requests=MAX_RUNNING_REQUESTS,
            attention_backend=arguments.backend,
            enable_prefix_cache=False,
        )
        return Engine.from_config(config, on_step=steps.append)


def group_of(step: StepRecord) -> str:
    if step.num_prefill_tokens:
        least = (step.num_prefill_tokens - 1) // PROMPT_TOKENS_A_LINE * PROMPT_TOKENS_A_LINE
        return f"{least + 1:5} to {least + PROMPT_TOKENS_A_LINE:5} prompt tokens"
    least = (step.batch_size - 1) // ROWS_A_LINE * ROWS_A_LINE
    return f"{least + 1:5} to {least + ROWS_A_LINE:5} decode rows  "


def lines_of(steps: Iterable[StepRecord]) -> list[str]:
    seconds: dict[str, list[float]] = defaultdict(list)
    for step in steps:
        seconds[group_of(step)].append(step.step_s)
    return [
        f"{group}: {len(own):4} steps, {statistics.median(own) * 1e3:8.2f} ms "
        f"(longest {max(own) * 1e3:8.2f}), {sum(own):7.3f} s"
        for group, own in sorted(seconds.items())
    ]


def main() -> None:
    parser = make_parser(__doc__.splitlines()[0])
    parser.add_argument("--backend", default=None, help="attention backend, default automatic")
    arguments = parser.parse_args()
    steps: list[StepRecord] = []
    engine = build(arguments, steps)
    while engine.prepare_while_idle():
        pass

    def generate(prompts: list[list[int]], max_tokens: list[int]) -> list[int]:
        params = [
            SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in max_tokens
        ]
        return [len(result.token_ids) for result in engine.generate(prompts, params)]

    runner = WorkloadRunner(generate, min(VOCAB_SIZE, engine.info.vocab_size))
    runner.warm_up(())
    batches = [one for one in WORKLOADS[arguments.workload] if isinstance(one, Batch)]
    for _ in range(arguments.repeats):
        for batch in batches:
            steps.clear()
            for name, value in runner.rows(batch):
                print(f"{name} {value}")
            print("\n".join(lines_of(steps)), flush=True)
    engine.close()


if __name__ == "__main__":
    main()
