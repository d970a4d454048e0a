"""SGLang 0.5.13 with an EAGLE-3 head's chains or trees, acceptance pretended: a peer of
benchmarks/h200/speculative.py.

    PYTHONPATH=SITE:SITE/nvidia_cutlass_dsl/python_packages \\
        python3 benchmarks/h200/peers/run_sglang_drafts.py CONFIG_JSON \\
        [--head HEAD_JSON --steps 3 [--topk 4 --verified 16] --acceptance 3.0]

Without --head it decodes plainly. How many drafts hold is drawn by SGLang itself, for all requests
of a step together: SGLANG_SIMULATE_ACC_LEN, where the mean is met by the whole part of it and one
more. A tree has as many tokens as --verified, the one sampled last among them. Settings are
run_sglang.py's; weights of model and head are noise. One line of JSON a measurement
(drafted_decode.py).
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

from benchmarks.h200.drafted_decode import (
    DraftedDecode,
    DraftsAsked,
    HeldRuns,
    config_folders,
    peer_parser,
)
from benchmarks.h200.driver import MAX_CONTEXT_LEN, MAX_RUNNING_REQUESTS, MEMORY_FRACTION
from benchmarks.h200.peers.noise import fill_with_noise
from benchmarks.h200.peers.run_sglang import MAIN_NAMES, use_noise

STARTED_S = time.perf_counter()


def fill_with_noise_and_ids(model: Any, *rest: Any) -> None:
    """As fill_with_noise. A head's tokens have ids of the model's, as a checkpoint names them: the
    first ones here."""
    import torch

    fill_with_noise(model, *rest)
    if hasattr(model, "hot_token_id"):
        model.hot_token_id = torch.arange(model.config.draft_vocab_size)


if __name__ in MAIN_NAMES:
    use_noise(fill_with_noise_and_ids)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = peer_parser("SGLang's drafts, acceptance pretended")
    parser.add_argument("--topk", type=int, default=1, help="drafts behind a token; 1: a chain")
    parser.add_argument("--verified", type=int, help="tokens of a tree, its root among them")
    parser.add_argument("--attention-backend", default="fa3")
    parser.add_argument("--draft-attention-backend", help="default: as --attention-backend")
    arguments = parser.parse_args(argv)
    if (arguments.topk > 1) != (arguments.verified is not None):
        parser.error("a tree has a --topk above 1 and --verified tokens, a chain neither")
    return arguments


def simulation(arguments: argparse.Namespace) -> dict[str, str]:
    """Environment of SGLang's processes."""
    if arguments.head is None:
        return {}
    return {
        "SGLANG_SIMULATE_ACC_LEN": str(arguments.acceptance),
        "SGLANG_SIMULATE_ACC_METHOD": "match-expected",
    }


def speculation(folders: list[str], arguments: argparse.Namespace) -> dict[str, Any]:
    """Arguments of SGLang's engine. folders: the model's, the head's if there is one."""
    if arguments.head is None:
        return {}
    return {
        "speculative_algorithm": "EAGLE3",
        "speculative_draft_model_path": folders[1],
        "speculative_num_steps": arguments.steps,
        "speculative_eagle_topk": arguments.topk,
        "speculative_num_draft_tokens": arguments.verified or 1 + arguments.steps,
        "speculative_draft_attention_backend": arguments.draft_attention_backend,
    }


def asked_of(arguments: argparse.Namespace) -> DraftsAsked:
    if arguments.head is None:
        return DraftsAsked("sglang", "plain", 1, None)
    verified = arguments.verified or 1 + arguments.steps
    is_chain = arguments.topk == 1
    drafts = verified - 1
    name = f"chain of {drafts}" if is_chain else f"tree of {drafts}, {arguments.steps} deep"
    return DraftsAsked("sglang", name, verified, arguments.acceptance)


class CountedRuns:
    """Of the requests that have ended, as SGLang tells of each."""

    def __init__(self) -> None:
        self.held = HeldRuns()

    def add(self, told: dict[str, Any]) -> None:
        """told: meta_info of an output; nothing about drafts where there were none."""
        num_steps = told.get("spec_verify_ct", 0)
        num_held = num_steps + told.get("spec_num_correct_drafts", 0)
        self.held = HeldRuns(self.held.num_rows + num_steps, self.held.num_tokens + num_held)


def main() -> None:
    arguments = parse_arguments()
    os.environ.update(simulation(arguments))
    import sglang

    with config_folders(arguments.config, arguments.head) as folders:
        engine = sglang.Engine(
            model_path=folders[0],
            load_format="dummy",
            skip_tokenizer_init=True,
            context_length=MAX_CONTEXT_LEN,
            mem_fraction_static=MEMORY_FRACTION,
            disable_radix_cache=True,
            max_running_requests=MAX_RUNNING_REQUESTS,
            cuda_graph_max_bs=MAX_RUNNING_REQUESTS,
            attention_backend=arguments.attention_backend,
            sampling_backend="pytorch",
            log_level="error",
            **speculation(folders, arguments),
        )
    runs = CountedRuns()

    def generate(prompts: list[list[int]], max_tokens: list[int]) -> list[int]:
        params = [{"temperature": 0.0, "max_new_tokens": n, "ignore_eos": True} for n in max_tokens]
        outputs = engine.generate(input_ids=prompts, sampling_params=params)
        for output in outputs:
            runs.add(output["meta_info"])
        return [len(output["output_ids"]) for output in outputs]

    asked = asked_of(arguments)
    start_s = round(time.perf_counter() - STARTED_S, 1)
    print(json.dumps({"engine": "sglang", "drafts": asked.drafts, "start_s": start_s}), flush=True)
    DraftedDecode(generate, lambda: runs.held).print_rows(asked, arguments)
    engine.shutdown()


if __name__ == "__main__":
    main()
