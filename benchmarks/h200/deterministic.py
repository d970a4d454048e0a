"""Deterministic mode: one answer of one request among random neighbours, and what that costs.

    python3 -m benchmarks.h200.deterministic CONFIG_JSON [--tp 2] [--engines ordinary fa3 triton]

Each engine runs in a process of its own, with random weights of the config's shapes: "ordinary" as
it is by default, the others deterministic with that attention backend. Deterministic ones answer
one request --repeats times while neighbours come and go, over few pages, and so that prompts are
cut and found in the cache in every way; then every engine runs a batch of equal requests twice. One
line of JSON an engine, and at the end how much longer each batch took than the ordinary engine's.
Exits with 1 where an engine had more than one answer.
"""

import argparse
import json
import logging
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.company import CompanySpec, answers_in_company
from benchmarks.h200.driver import Job
from workers.config import EngineConfig
from workers.engine.engine import Engine
from workers.parallel.local_engine import build_local_engine
from workers.sampling.params import SamplingParams

ORDINARY = "ordinary"
ENGINES = (ORDINARY, "fa3", "triton")
VOCAB_SIZE = 100_000
NUM_BATCHES = 2
_BATCH_REQUESTS = 64
_BATCH_PROMPT_TOKENS = 1024
_BATCH_OUTPUT_TOKENS = 256
_PAGE_SIZE = 64
_NUM_PAGES = 1400
_MAX_RUNNING_REQUESTS = 96
_PROMPT = tuple(random.Random(1).randrange(10, VOCAB_SIZE) for _ in range(300))
_SAMPLING = SamplingParams(
    temperature=0.8, top_p=0.9, seed=5, max_tokens=16, ignore_eos=True, logprobs=5
)
_MAX_NEIGHBOUR_TOKENS = 2000
_MAX_NEIGHBOUR_OUTPUT = 64
_NUM_LIVE = 128


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("config", type=Path, help="a Hugging Face config.json")
    parser.add_argument("--tp", type=int, default=1, help="GPUs that share the model")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--repeats", type=int, default=1000)
    parser.add_argument("--layers", type=int, help="of the model, fewer than the config's")
    parser.add_argument("--one", choices=ENGINES, help="this engine, in this process")
    return parser.parse_args()


def build(name: str, job: Job, num_layers: int | None) -> Engine:
    is_deterministic = name != ORDINARY
    with job.model_folder() as folder:
        if num_layers is not None:
            path = Path(folder) / "config.json"
            whole = json.loads(path.read_text(encoding="utf-8"))
            path.write_text(json.dumps({**whole, "num_hidden_layers": num_layers}))
        config = EngineConfig(
            model=folder,
            load_format="dummy",
            tp_size=job.tp_size,
            max_context_len=4096,
            max_running_requests=_MAX_RUNNING_REQUESTS,
            page_size=_PAGE_SIZE,
            num_pages=_NUM_PAGES,
            deterministic=is_deterministic,
            attention_backend=name if is_deterministic else None,
        )
        return build_local_engine(config, lambda done, total: None)


def settle(engine: Engine) -> None:
    while engine.prepare_while_idle():
        pass


def batch_seconds(engine: Engine, seed: int) -> float:
    """Of requests that come at once, until the last has ended; nothing of them is cached."""
    rng = random.Random(seed)
    prompts = [
        [rng.randrange(10, VOCAB_SIZE) for _ in range(_BATCH_PROMPT_TOKENS)]
        for _ in range(_BATCH_REQUESTS)
    ]
    params = SamplingParams(temperature=0.0, max_tokens=_BATCH_OUTPUT_TOKENS, ignore_eos=True)
    start_s = time.perf_counter()
    engine.generate(prompts, params)
    return time.perf_counter() - start_s


def company_facts(engine: Engine, num_repeats: int) -> dict[str, Any]:
    spec = CompanySpec(
        prompt=_PROMPT,
        sampling=_SAMPLING,
        num_repeats=num_repeats,
        num_live=_NUM_LIVE,
        max_prompt_tokens=_MAX_NEIGHBOUR_TOKENS,
        max_output_tokens=_MAX_NEIGHBOUR_OUTPUT,
        vocab_size=VOCAB_SIZE,
    )
    start_s = time.perf_counter()
    # Its first steps capture graphs: eager ones and replays alike have to give the same.
    answers = answers_in_company(engine, spec)
    stats = engine.stats()
    return {
        "num_repeats": answers.total(),
        "num_answers": len(answers),
        "num_texts": len({tokens for tokens, _ in answers}),
        "most_common": answers.most_common(1)[0][1],
        "company_s": round(time.perf_counter() - start_s, 2),
        "num_retractions": stats.num_preemptions,
        "num_steps": stats.num_steps,
        "share_cached": round(stats.num_cached_prompt_tokens / max(stats.num_prompt_tokens, 1), 3),
    }


def run_one(name: str, job: Job, arguments: argparse.Namespace) -> None:
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    start_s = time.perf_counter()
    engine = build(name, job, arguments.layers)
    found: dict[str, Any] = {"engine": name, "tp": job.tp_size}
    found["attention"] = engine.info.attention_backend
    found["start_s"] = round(time.perf_counter() - start_s, 2)
    if name != ORDINARY:
        found |= company_facts(engine, arguments.repeats)
    settle(engine)
    batch_seconds(engine, 0)
    seconds = [batch_seconds(engine, 1 + index) for index in range(NUM_BATCHES)]
    found["batch_s"] = [round(one, 3) for one in seconds]
    print(json.dumps(found), flush=True)
    engine.close()


def run_all(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    found = []
    for name in arguments.engines:
        command = [sys.executable, "-m", "benchmarks.h200.deterministic", str(arguments.config)]
        command += ["--one", name, "--tp", str(arguments.tp)]
        command += ["--repeats", str(arguments.repeats)]
        command += ["--layers", str(arguments.layers)] if arguments.layers else []
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        print(done.stdout, end="", flush=True)
        if done.returncode:
            print(json.dumps({"engine": name, "exit": done.returncode}), flush=True)
        else:
            found.append(json.loads(done.stdout.splitlines()[-1]))
    return found


def main() -> int:
    arguments = parse_arguments()
    if arguments.one is not None:
        job = Job(arguments.config, "full", 1, arguments.tp)
        run_one(arguments.one, job, arguments)
        return 0
    found = run_all(arguments)
    ordinary = [min(one["batch_s"]) for one in found if one["engine"] == ORDINARY]
    for one in found:
        if ordinary and one["engine"] != ORDINARY:
            cost = min(one["batch_s"]) / ordinary[0] - 1.0
            print(f"{one['engine']}: {cost:+.1%} time a batch", flush=True)
    is_whole = len(found) == len(arguments.engines)
    return 0 if is_whole and all(one.get("num_answers", 1) == 1 for one in found) else 1


if __name__ == "__main__":
    sys.exit(main())
