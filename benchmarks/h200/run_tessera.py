"""Tessera's engine, in process, on the workloads of the performance table.

    python3 -m benchmarks.h200.run_tessera benchmarks/h200/models/llama-3.1-8b.json

One JSON line a repeat. startup_s runs from the process's first line to an engine that takes
requests, imports included; weights are random (load_format dummy), shapes the config's.
"""

import time

_STARTED_S = time.perf_counter()

import argparse  # noqa: E402  the clock starts before the imports that it measures
import json  # noqa: E402
import logging  # noqa: E402
import shutil  # noqa: E402
import tempfile  # noqa: E402
from pathlib import Path  # noqa: E402

from benchmarks.h200.workloads import WorkloadRunner  # noqa: E402
from workers.config import EngineConfig  # noqa: E402
from workers.engine import Engine  # noqa: E402
from workers.sampling.params import SamplingParams  # noqa: E402

# The peers' drivers draw their prompts from as many ids.
VOCAB_SIZE = 120_000
MAX_CONTEXT_LEN = 8192


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", type=Path, help="a Hugging Face config.json")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--decode-only", action="store_true", help="leave the long batches out")
    parser.add_argument("--step-tokens", type=int, default=8192, help="token budget of a step")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--backend", default=None, help="attention backend, default automatic")
    return parser.parse_args()


def build_engine(arguments: argparse.Namespace, folder: Path) -> Engine:
    shutil.copy(arguments.config, folder / "config.json")
    return Engine.from_config(
        EngineConfig(
            model=str(folder),
            load_format="dummy",
            max_context_len=MAX_CONTEXT_LEN,
            attention_backend=arguments.backend,
            max_step_tokens=arguments.step_tokens,
            enable_prefix_cache=False,
            enable_cuda_graphs=not arguments.eager,
        )
    )


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    import_s = time.perf_counter() - _STARTED_S
    arguments = parse_arguments()
    with tempfile.TemporaryDirectory() as scratch:
        engine = build_engine(arguments, Path(scratch))
    startup_s = round(time.perf_counter() - _STARTED_S, 2)
    logging.info("ready after %.2f s, of which imports %.2f s", startup_s, import_s)

    def generate(prompts: list[list[int]], max_tokens: int) -> list[int]:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        return [len(result.token_ids) for result in engine.generate(prompts, params)]

    runner = WorkloadRunner(generate, VOCAB_SIZE)
    runner.warm_up()
    for repeat in range(arguments.repeats):
        row: dict[str, float | str] = {"engine": "tessera", "repeat": repeat}
        row["startup_s"] = startup_s
        row.update(runner.rows(with_batches=not arguments.decode_only))
        print(json.dumps(row), flush=True)
    engine.close()


if __name__ == "__main__":
    main()
