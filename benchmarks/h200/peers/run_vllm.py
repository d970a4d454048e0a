"""vLLM 0.20.0 on the workloads, offline, weights noise: a driver as driver.py describes it.

    PYTHONPATH=VLLM_SITE python3 benchmarks/h200/peers/run_vllm.py CONFIG_JSON [--workload prefix]

The settings are vLLM's defaults but for what the table fixes for everybody: context, memory,
running requests, prefix cache on or off. Its sampler is PyTorch's, its products of experts are
Triton's, those of linear layers with FP8 in blocks CUTLASS's: FlashInfer's and DeepGEMM's have to
be compiled first, for minutes. An environment that names one of these keeps what it says. Over
several GPUs nothing takes NVLink multicast, for vLLM as for everybody: its own all-reduce for what
is small and NCCL for the rest, not PyTorch's multimem kernels and not FlashInfer's all-reduce with
the norm in it.
"""

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "fork",
    "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_USE_FLASHINFER_MOE_FP16": "0",
    "VLLM_USE_FLASHINFER_MOE_FP8": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}
WITHOUT_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_USE_NCCL_SYMM_MEM": "0",
}
UNFUSED_COLLECTIVES = {"fuse_allreduce_rms": False, "fuse_gemm_comms": False}


def rank_settings(tp_size: int, ep_size: int) -> tuple[dict[str, str], dict[str, Any]]:
    """(environment, arguments of LLM) of several GPUs, off NVLink multicast. Raises ValueError for
    an ep_size that vLLM has not: whole experts on every GPU's own, or all of them cut by all."""
    if ep_size not in (1, tp_size):
        raise ValueError(f"vLLM divides experts over all GPUs or none, not ep_size={ep_size}")
    if tp_size == 1:
        return {}, {}
    return WITHOUT_MULTICAST, {
        "compilation_config": {"pass_config": UNFUSED_COLLECTIVES},
        "enable_expert_parallel": ep_size > 1,
    }


def apply_environment(forced: Mapping[str, str]) -> None:
    """ENVIRONMENT where nothing else is said, and what is forced."""
    os.environ.update(ENVIRONMENT | dict(os.environ) | dict(forced))


def main() -> None:
    started_s = time.perf_counter()
    job = job_of(make_parser("vLLM on the workloads").parse_args())
    environment, settings = rank_settings(job.tp_size, job.ep_size)
    apply_environment(environment)
    from vllm import LLM, SamplingParams
    from vllm.model_executor.model_loader import dummy_loader

    # The engine's own process is a fork of this one.
    dummy_loader.initialize_dummy_weights = fill_with_noise
    with job.model_folder() as folder:
        llm = LLM(
            folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=MAX_CONTEXT_LEN,
            gpu_memory_utilization=MEMORY_FRACTION,
            enable_prefix_caching=job.has_prefix_cache,
            max_num_seqs=MAX_RUNNING_REQUESTS,
            disable_log_stats=True,
            tensor_parallel_size=job.tp_size,
            **settings,
        )

    def generate(prompts: list[list[int]], max_tokens: list[int]) -> list[int]:
        params = [
            SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True, detokenize=False)
            for n in max_tokens
        ]
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = llm.generate(requests, params, use_tqdm=False)
        return [len(output.outputs[0].token_ids) for output in outputs]

    measure("vllm", job, generate, started_s)


if __name__ == "__main__":
    main()
