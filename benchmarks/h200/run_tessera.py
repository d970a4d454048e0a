"""Tessera's engine, in process, on the workloads: a driver as driver.py describes it.

    python3 -m benchmarks.h200.run_tessera CONFIG_JSON [--workload prefix]

startup_s runs from the process's first line to an engine that takes requests, imports included;
weights are random (load_format dummy), shapes the config's.
"""

import time

_STARTED_S = time.perf_counter()

import argparse  # noqa: E402  the clock starts before the imports that it measures
import logging  # noqa: E402

from benchmarks.h200.driver import (  # noqa: E402
    MAX_CONTEXT_LEN,
    MAX_RUNNING_REQUESTS,
    MEMORY_FRACTION,
    Job,
    job_of,
    make_parser,
    measure,
)
from workers.config import EngineConfig, ModelImpl  # noqa: E402
from workers.parallel.local_engine import build_local_engine  # noqa: E402
from workers.sampling.params import SamplingParams  # noqa: E402


def parse_arguments() -> argparse.Namespace:
    parser = make_parser("Tessera on the workloads")
    parser.add_argument("--step-tokens", type=int, default=8192, help="token budget of a step")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--no-peer-memory", action="store_true", help="ranks add up by NCCL")
    parser.add_argument(
        "--decode-only", dest="workload", action="store_const", const="decode", help="short for it"
    )
    parser.add_argument("--backend", default=None, help="attention backend, default automatic")
    code = parser.add_mutually_exclusive_group()
    code.add_argument("--native", action="store_true", help="not through transformers")
    code.add_argument("--transformers", action="store_true", help="in transformers' own code")
    parser.add_argument("--deterministic", action="store_true", help="the same bits in any batch")
    return parser.parse_args()


def _model_impl(arguments: argparse.Namespace) -> ModelImpl:
    if arguments.transformers:
        return "transformers"
    return "native" if arguments.native else "auto"


def engine_config(job: Job, folder: str, arguments: argparse.Namespace) -> EngineConfig:
    return EngineConfig(
        model=folder,
        load_format="dummy",
        tp_size=job.tp_size,
        ep_size=job.ep_size,
        model_impl=_model_impl(arguments),
        max_context_len=MAX_CONTEXT_LEN,
        gpu_memory_fraction=MEMORY_FRACTION,
        max_running_requests=MAX_RUNNING_REQUESTS,
        attention_backend=arguments.backend,
        max_step_tokens=arguments.step_tokens,
        enable_prefix_cache=job.has_prefix_cache,
        enable_cuda_graphs=not arguments.eager,
        enable_peer_memory=not arguments.no_peer_memory,
        deterministic=arguments.deterministic,
    )


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    logging.info("imports took %.2f s", time.perf_counter() - _STARTED_S)
    arguments = parse_arguments()
    job = job_of(arguments)
    with job.model_folder() as folder:
        engine = build_local_engine(engine_config(job, folder, arguments), lambda done, total: None)

    def generate(prompts: list[list[int]], max_tokens: list[int]) -> list[int]:
        params = [
            SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in max_tokens
        ]
        return [len(result.token_ids) for result in engine.generate(prompts, params)]

    def settle() -> None:
        while engine.prepare_while_idle():
            pass

    measure("tessera", job, generate, _STARTED_S, settle)
    engine.close()


if __name__ == "__main__":
    main()
