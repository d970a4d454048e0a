"""SGLang 0.5.13 on the workloads, offline, weights random: a driver as driver.py describes it.

    PYTHONPATH=SITE:SITE/nvidia_cutlass_dsl/python_packages \\
        python3 benchmarks/h200/peers/run_sglang.py CONFIG_JSON [--workload prefix]

FlashAttention-3 and PyTorch's sampler, as its fastest setting on this GPU that compiles nothing;
context, memory, running requests and prefix cache are what the table fixes for everybody.
"""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

# Behind the engine's own packages, so that nothing here stands in for one of them.
sys.path.append(str(Path(__file__).resolve().parents[3]))

from benchmarks.h200.driver import (
    MAX_CONTEXT_LEN,
    MAX_RUNNING_REQUESTS,
    MEMORY_FRACTION,
    job_of,
    make_parser,
    measure,
)
from benchmarks.h200.peers.noise import fill_with_noise

ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1"}


MAIN_NAMES = ("__main__", "__mp_main__")
"""Of a driver's module, as it is started and as processes that it spawns import it."""

STARTED_S = time.perf_counter()


def use_noise(fill: Callable[..., None] = fill_with_noise) -> None:
    """SGLang's scheduler is a process of its own that imports this module: it is told there too."""
    os.environ.update(ENVIRONMENT)
    from sglang.srt.model_loader import loader

    loader.initialize_dummy_weights = fill


if __name__ in MAIN_NAMES:
    use_noise()


def main() -> None:
    job = job_of(make_parser("SGLang on the workloads").parse_args())
    import sglang

    with job.model_folder() as folder:
        engine = sglang.Engine(
            model_path=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            context_length=MAX_CONTEXT_LEN,
            mem_fraction_static=MEMORY_FRACTION,
            disable_radix_cache=not job.has_prefix_cache,
            max_running_requests=MAX_RUNNING_REQUESTS,
            cuda_graph_max_bs=MAX_RUNNING_REQUESTS,
            attention_backend="fa3",
            sampling_backend="pytorch",
            log_level="error",
            tp_size=job.tp_size,
            ep_size=job.ep_size,
        )

    def generate(prompts: list[list[int]], max_tokens: list[int]) -> list[int]:
        params = [{"temperature": 0.0, "max_new_tokens": n, "ignore_eos": True} for n in max_tokens]
        outputs = engine.generate(input_ids=prompts, sampling_params=params)
        return [len(output["output_ids"]) for output in outputs]

    measure("sglang", job, generate, STARTED_S)
    engine.shutdown()


if __name__ == "__main__":
    main()
