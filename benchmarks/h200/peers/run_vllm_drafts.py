"""vLLM 0.20.0 with an EAGLE-3 head's chains, acceptance pretended: a peer of
benchmarks/h200/speculative.py.

    PYTHONPATH=VLLM_SITE python3 benchmarks/h200/peers/run_vllm_drafts.py CONFIG_JSON \\
        [--head HEAD_JSON --steps 3 --acceptance 3.0]

Without --head it decodes plainly. How many drafts hold is drawn by vLLM itself: its synthetic
rejection sampler, where the mean is met by the whole part of it and one more. Its trees are drafted
only, what verifies them takes them for chains: none here. Settings are run_vllm.py's; weights of
model and head are noise. One line of JSON a measurement (drafted_decode.py).
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from multiprocessing import RawValue
from pathlib import Path
from typing import Any

# Behind the engine's own packages, so that nothing here stands in for one of them.
sys.path.append(str(Path(__file__).resolve().parents[3]))

from benchmarks.h200.drafted_decode import (
    DraftedDecode,
    DraftsAsked,
    HeldRuns,
    config_folders,
    peer_parser,
)
from benchmarks.h200.driver import MAX_CONTEXT_LEN, MAX_RUNNING_REQUESTS, MEMORY_FRACTION
from benchmarks.h200.peers.noise import fill_with_noise
from benchmarks.h200.peers.run_vllm import ENVIRONMENT


def fill_with_noise_of_its_own(module: Any, *rest: Any) -> None:
    """As fill_with_noise. A head whose weights nobody has read would borrow the model's output
    layer, of four times as many tokens."""
    fill_with_noise(module, *rest)
    if hasattr(module, "draft_id_to_target_id"):
        module.has_own_lm_head = True


def count_runs(scheduler: Any) -> Callable[[], HeldRuns]:
    """Of vLLM's class: rows that verified drafts, in whatever fork of this process."""
    num_rows, num_tokens = RawValue("q", 0), RawValue("q", 0)
    make_stats = scheduler.make_spec_decoding_stats

    def counted(self: Any, *arguments: Any, **named: Any) -> Any:
        if named["num_draft_tokens"]:
            num_rows.value += 1
            num_tokens.value += 1 + named["num_accepted_tokens"]
        return make_stats(self, *arguments, **named)

    scheduler.make_spec_decoding_stats = counted
    return lambda: HeldRuns(num_rows.value, num_tokens.value)


def speculation(folders: list[str], arguments: argparse.Namespace) -> dict[str, Any] | None:
    """vLLM's speculative_config; None where there is no head. folders: the model's, the head's."""
    if arguments.head is None:
        return None
    return {
        "method": "eagle3",
        "model": folders[1],
        "num_speculative_tokens": arguments.steps,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_length": arguments.acceptance,
    }


def asked_of(arguments: argparse.Namespace) -> DraftsAsked:
    if arguments.head is None:
        return DraftsAsked("vllm", "plain", 1, None)
    steps = arguments.steps
    return DraftsAsked("vllm", f"chain of {steps}", 1 + steps, arguments.acceptance)


def main() -> None:
    started_s = time.perf_counter()
    arguments = peer_parser("vLLM's drafts, acceptance pretended").parse_args()
    os.environ.update(ENVIRONMENT)
    from vllm import LLM, SamplingParams
    from vllm.model_executor.model_loader import dummy_loader
    from vllm.v1.core.sched.scheduler import Scheduler

    # The engine's own process is a fork of this one.
    dummy_loader.initialize_dummy_weights = fill_with_noise_of_its_own
    held = count_runs(Scheduler)
    with config_folders(arguments.config, arguments.head) as folders:
        llm = LLM(
            folders[0],
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=MAX_CONTEXT_LEN,
            gpu_memory_utilization=MEMORY_FRACTION,
            enable_prefix_caching=False,
            max_num_seqs=MAX_RUNNING_REQUESTS,
            disable_log_stats=True,
            speculative_config=speculation(folders, arguments),
        )

    def generate(prompts: list[list[int]], max_tokens: list[int]) -> list[int]:
        params = [
            SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True, detokenize=False)
            for n in max_tokens
        ]
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = llm.generate(requests, params, use_tqdm=False)
        return [len(output.outputs[0].token_ids) for output in outputs]

    asked = asked_of(arguments)
    start_s = round(time.perf_counter() - started_s, 1)
    print(json.dumps({"engine": "vllm", "drafts": asked.drafts, "start_s": start_s}), flush=True)
    DraftedDecode(generate, held).print_rows(asked, arguments)


if __name__ == "__main__":
    main()
