"""Speculative decoding beside plain decoding, with pretended acceptance: ms a token of a stream.

    python3 -m benchmarks.h200.speculative CONFIG_JSON [--streams 1 8 ...] [--acceptance 1 2 3 4]

Random weights of the config's shapes, one engine after the other in one process: without drafts,
with chains of fixed lengths, and with lengths chosen as they pay. Which drafts are right is drawn:
each with one and the same chance where those before it were, so that a run of the longest chain in
question brings as many tokens as --acceptance says; chains of other lengths have the same chance a
draft. What a step launches is what real drafts would launch, and n-grams are looked up for them;
texts mean nothing. ms_a_token counts from the moment when every stream has its first token until
the first has its last. One line of JSON a measurement.
"""

import argparse
import gc
import json
import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.h200.driver import MAX_CONTEXT_LEN, MAX_RUNNING_REQUESTS, MEMORY_FRACTION, Job
from benchmarks.h200.full_batch import tokens_a_second
from workers.config import EngineConfig
from workers.engine.engine import Engine
from workers.parallel.local_engine import build_local_engine
from workers.runner.drafting_executor import DraftingExecutor
from workers.scheduler.plan import IntArray
from workers.speculation.adaptive import AdaptiveLength

WARM_UP_TOKENS = (24, 384)
"""Of a stream, where the length is fixed and where it is learnt."""


class DrawnAcceptance:
    """A Verifier whose drafts are right by chance, each behind right ones."""

    def __init__(self) -> None:
        self.chance = 0.0
        self._rng = np.random.default_rng(1)

    def accept(
        self, token_ids: torch.Tensor, input_ids: torch.Tensor, num_samples: IntArray
    ) -> torch.Tensor:
        right = self._rng.random((len(num_samples), int(num_samples.max()))) < self.chance
        right &= np.arange(right.shape[1]) < num_samples[:, None] - 1
        return torch.from_numpy(1 + right.cumprod(axis=1).sum(axis=1))


def chance_of(tokens_a_step: float, num_drafts: int) -> float:
    """Of a draft, so that a run of so many drafts brings so many tokens, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        mean = sum(middle**power for power in range(num_drafts + 1))
        low, high = (middle, high) if mean < tokens_a_step else (low, middle)
    return (low + high) / 2


def build(folder: str, tp_size: int, drafts: dict[str, Any]) -> Engine:
    config = EngineConfig(
        model=folder,
        load_format="dummy",
        tp_size=tp_size,
        max_context_len=MAX_CONTEXT_LEN,
        gpu_memory_fraction=MEMORY_FRACTION,
        max_running_requests=MAX_RUNNING_REQUESTS,
        enable_prefix_cache=False,
        **drafts,
    )
    engine = build_local_engine(config, lambda done, total: None)
    while engine.prepare_while_idle():
        pass
    return engine


def ms_a_token(engine: Engine, num_streams: int, num_tokens: int) -> float:
    """Of one stream among num_streams."""
    return num_streams / tokens_a_second(engine, num_streams, num_tokens) * 1e3


def measure(
    engine: Engine, name: str, arguments: argparse.Namespace, acceptance: Sequence[float]
) -> None:
    executor, verifier = engine._executor, DrawnAcceptance()
    if isinstance(executor, DraftingExecutor):
        executor._verifier = verifier
    for num_streams in arguments.streams:
        for wanted in acceptance:
            verifier.chance = chance_of(wanted, max(arguments.chains))
            policy = engine._scheduler._drafts
            if isinstance(policy, AdaptiveLength):
                # As at a start: what was learnt at another acceptance is worth nothing here.
                policy.__init__(max(arguments.chains))  # type: ignore[misc]
            ms_a_token(engine, num_streams, WARM_UP_TOKENS[name == "adaptive"])
            before = engine.stats()
            found = [
                ms_a_token(engine, num_streams, arguments.tokens) for _ in range(arguments.repeats)
            ]
            after = engine.stats()
            row = {
                "drafts": name,
                "streams": num_streams,
                "acceptance": None if name == "plain" else wanted,
                "ms_a_token": round(min(found), 4),
                "all_ms": [round(one, 4) for one in found],
                "steps": after.num_steps - before.num_steps,
                "tokens_a_step": round(
                    (after.num_output_tokens - before.num_output_tokens)
                    / (after.num_steps - before.num_steps)
                    / num_streams,
                    2,
                ),
            }
            print(json.dumps(row), flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("config", type=Path, help="a Hugging Face config.json")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32, 64, 256])
    parser.add_argument("--acceptance", type=float, nargs="+", default=[1.0, 2.0, 3.0, 4.0])
    parser.add_argument("--chains", type=int, nargs="+", default=[3, 5])
    parser.add_argument("--tokens", type=int, default=128, help="of a stream")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--layers", type=int, help="of the model, fewer than the config's")
    parser.add_argument("--tp", type=int, default=1)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    kinds: dict[str, dict[str, Any]] = {"plain": {}}
    for chain in arguments.chains:
        kinds[f"chain of {chain}"] = {
            "speculative": "ngram",
            "draft_policy": "fixed",
            "max_draft_tokens": chain,
        }
    kinds["adaptive"] = {"speculative": "ngram", "max_draft_tokens": max(arguments.chains)}
    job = Job(arguments.config, "full", arguments.repeats, arguments.tp)
    for name, drafts in kinds.items():
        with job.model_folder() as folder:
            if arguments.layers is not None:
                path = Path(folder) / "config.json"
                whole = json.loads(path.read_text(encoding="utf-8"))
                path.write_text(json.dumps({**whole, "num_hidden_layers": arguments.layers}))
            start_s = time.perf_counter()
            engine = build(folder, arguments.tp, drafts)
        print(json.dumps({"drafts": name, "start_s": round(time.perf_counter() - start_s, 1)}))
        measure(engine, name, arguments, [1.0] if name == "plain" else arguments.acceptance)
        engine.close()
        del engine
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
