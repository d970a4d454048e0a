"""vLLM 0.20.0 on the streams of structured_workload.py, with its structured output: a peer of
benchmarks/h200/structured.py.

    PYTHONPATH=VLLM_SITE python3 benchmarks/h200/peers/run_vllm_structured.py FOLDER [--repeats N]

Prints decode_s (the time for all tokens less the time for one each) and tokens_per_s of it, with
none, half and all of the streams constrained. Its sampler is PyTorch's, as in run_vllm.py; which
library makes its masks is its own choice.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

# Behind the engine's own packages, so that nothing here stands in for one of them.
sys.path.append(str(Path(__file__).resolve().parents[3]))

from benchmarks.h200.driver import MAX_CONTEXT_LEN, MAX_RUNNING_REQUESTS, MEMORY_FRACTION
from benchmarks.h200.peers.run_vllm import ENVIRONMENT
from benchmarks.h200.structured_workload import (
    COMPANIES,
    MAX_TOKENS,
    Stream,
    schema_of_20_fields,
    streams,
)


def seconds(llm: Any, own: list[Stream], max_tokens: int, temperature: float) -> tuple[float, int]:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    schema = json.loads(schema_of_20_fields())
    params = [
        SamplingParams(
            temperature=temperature,
            seed=stream.seed if temperature else None,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            structured_outputs=StructuredOutputsParams(json=schema)
            if stream.is_constrained
            else None,
        )
        for stream in own
    ]
    requests = [{"prompt_token_ids": stream.prompt} for stream in own]
    start_s = time.perf_counter()
    outputs = llm.generate(requests, params, use_tqdm=False)
    elapsed_s = time.perf_counter() - start_s
    return elapsed_s, sum(len(output.outputs[0].token_ids) for output in outputs)


def main() -> None:
    parser = argparse.ArgumentParser(description="vLLM's structured output beside plain text")
    parser.add_argument("folder")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    from vllm import LLM

    llm = LLM(
        arguments.folder,
        load_format="dummy",
        max_model_len=MAX_CONTEXT_LEN,
        gpu_memory_utilization=MEMORY_FRACTION,
        enable_prefix_caching=False,
        max_num_seqs=MAX_RUNNING_REQUESTS,
        disable_log_stats=True,
    )
    for temperature in arguments.temperature:
        for repeat in range(arguments.repeats + 1):
            for company, number in COMPANIES.items():
                own = streams(number, 1 + repeat)
                one_s, num_first = seconds(llm, own, 1, temperature)
                all_s, num_tokens = seconds(llm, own, MAX_TOKENS, temperature)
                row = {
                    "engine": "vllm",
                    "constrained": company,
                    "temperature": temperature,
                    "decode_s": round(all_s - one_s, 4),
                    "tokens_per_s": round((num_tokens - num_first) / (all_s - one_s), 1),
                    "num_tokens": num_tokens,
                }
                print("warming up:" if repeat == 0 else "", json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
