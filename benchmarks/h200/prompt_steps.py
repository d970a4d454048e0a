"""What a step of prompts takes by how many tokens it holds: where products fill the GPU badly.

    python3 -m benchmarks.h200.prompt_steps benchmarks/h200/models/llama-3.1-8b.json

Steps of so many tokens, as eight prompts each, so that attention is nearly the same share of all.
Prints the median of a few runs, submission to first tokens, and tokens a second; a step whose
tokens a second fall below those of the step before it has begun another wave of tiles. The
scheduler's time for a step counts, as it does for a stream that waits. The engine's own log shows
what it found its products to take.
"""

import argparse
import logging
import random
import shutil
import statistics
import tempfile
import time
from pathlib import Path

from workers.config import EngineConfig
from workers.engine.engine import Engine
from workers.parallel.local_engine import build_local_engine
from workers.sampling.params import SamplingParams

NUM_PROMPTS = 8
NUM_RUNS = 5
STEPS_TOKENS = (*range(1024, 4097, 128), 5120, 6144, 7168, 8192)
ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


def step_seconds(engine: Engine, num_tokens: int, rng: random.Random) -> float:
    """Of one step that holds all of NUM_PROMPTS new prompts, num_tokens together."""
    length = num_tokens // NUM_PROMPTS
    prompts = [[rng.randrange(10, 1000) for _ in range(length)] for _ in range(NUM_PROMPTS)]
    start_s = time.perf_counter()
    engine.generate(prompts, ONE_TOKEN)
    return time.perf_counter() - start_s


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("config", type=Path, help="a Hugging Face config.json")
    parser.add_argument("--tokens", nargs="+", type=int, default=STEPS_TOKENS, metavar="N")
    parser.add_argument("--dtype", default="auto")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(arguments.config, Path(folder) / "config.json")
        engine = build_local_engine(
            EngineConfig(
                model=folder,
                load_format="dummy",
                dtype=arguments.dtype,
                max_context_len=max(1024, max(arguments.tokens) // NUM_PROMPTS + 1),
                max_step_tokens=max(arguments.tokens),
                target_inter_token_ms=50.0,
                enable_prefix_cache=False,
            ),
            lambda done, total: None,
        )
    while engine.prepare_while_idle():
        pass
    rng = random.Random(0)
    print("| tokens | ms | tokens/s |\n|---|---|---|")
    for num_tokens in arguments.tokens:
        runs = [step_seconds(engine, num_tokens, rng) for _ in range(NUM_RUNS + 1)]
        median_s = statistics.median(runs[1:])
        print(f"| {num_tokens} | {median_s * 1e3:.2f} | {num_tokens / median_s:,.0f} |", flush=True)
    engine.close()


if __name__ == "__main__":
    main()
