"""Speculative decoding beside plain decoding, with pretended acceptance: ms a token of a stream.

    python3 -m benchmarks.h200.speculative CONFIG_JSON [--streams 1 8 ...] [--acceptance 1 2 3 4]
    python3 -m benchmarks.h200.speculative CONFIG_JSON --tree 4 4 4 4 [--tree ...]

Random weights of the config's shapes, one engine after the other in one process: without drafts,
with chains of fixed lengths, and with lengths chosen as they pay. Which drafts are right is drawn:
each with one and the same chance where those before it were, so that a run of the longest chain in
question brings as many tokens as --acceptance says; chains of other lengths have the same chance a
draft. What a step launches is what real drafts would launch, and n-grams are looked up for them;
texts mean nothing. With --tree, an EAGLE-3 head of random weights makes trees of so many drafts at
each depth, and chains beside them; a tree's paths have, on the average, as many tokens as
--acceptance says, or as they can. ms_a_token counts from the moment when every stream has its first
token until the first has its last. One line of JSON a measurement.
"""

import argparse
import gc
import json
import logging
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
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
from workers.scheduler.plan_tree import PlanTrees
from workers.speculation.adaptive import AdaptiveLength
from workers.speculation.tree import HeldPaths, TreeVerifier

WARM_UP_TOKENS = (24, 384)
"""Of a stream, where the length is fixed and where it is learnt."""
HEAD_VOCAB_SIZE = 32_000
"""Of published heads for models of 128,256 tokens."""
_HEAD_KEYS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "head_dim"),
    *("num_key_value_heads", "rms_norm_eps", "rope_theta", "max_position_embeddings"),
)


@dataclass(frozen=True, slots=True)
class Kind:
    """drafts: settings of the engine. most_drafts: as measure takes it."""

    name: str
    drafts: dict[str, Any]
    most_drafts: int


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


class DrawnPaths(TreeVerifier):
    """Whose paths hold by chance to some depth: each draft behind right ones."""

    def __init__(self, drawn: DrawnAcceptance) -> None:
        self._drawn = drawn

    def accept(
        self,
        token_ids: torch.Tensor,
        input_ids: torch.Tensor,
        num_samples: IntArray,
        trees: PlanTrees,
    ) -> HeldPaths:
        starts = np.cumsum(num_samples) - num_samples
        deepest = np.maximum.reduceat(trees.depths, starts).astype(np.int32)
        run_lens = self._drawn.accept(token_ids, input_ids, deepest + np.int32(1))
        return HeldPaths(run_lens, torch.arange(len(token_ids)))


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
    engine: Engine,
    name: str,
    arguments: argparse.Namespace,
    acceptance: Sequence[float],
    most_drafts: int,
) -> None:
    """most_drafts: one behind the other, of the run that brings as many tokens as asked for."""
    executor, verifier = engine._executor, DrawnAcceptance()
    if isinstance(executor, DraftingExecutor):
        executor._verifier, executor._tree_verifier = verifier, DrawnPaths(verifier)
    for num_streams in arguments.streams:
        for wanted in acceptance:
            verifier.chance = chance_of(wanted, most_drafts)
            policy = engine._scheduler._drafts
            if isinstance(policy, AdaptiveLength):
                # As at a start: what was learnt at another acceptance is worth nothing here.
                policy.__init__(most_drafts)  # type: ignore[misc]
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


def write_head(folder: Path, target: dict[str, Any]) -> None:
    """config.json of an EAGLE-3 head as published ones are, for a target's config.json."""
    num_layers = target["num_hidden_layers"]
    own = {key: target[key] for key in _HEAD_KEYS if key in target}
    taps = [index * (num_layers - 1) // 3 for index in range(3)]
    head = {
        **own,
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_act": "silu",
        "num_hidden_layers": 1,
        "tie_word_embeddings": False,
        "draft_vocab_size": min(HEAD_VOCAB_SIZE, target["vocab_size"]),
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": taps},
    }
    (folder / "config.json").write_text(json.dumps(head), encoding="utf-8")


def kinds_of(arguments: argparse.Namespace, head: Path) -> list[Kind]:
    """head: a folder for trees' drafter, and for the chains beside them."""
    most, fixed = max(arguments.chains), {"draft_policy": "fixed"}
    kinds = [Kind("plain", {}, most)]
    if not arguments.tree:
        for chain in arguments.chains:
            drafts = {"speculative": "ngram", "max_draft_tokens": chain, **fixed}
            kinds.append(Kind(f"chain of {chain}", drafts, most))
        adaptive = {"speculative": "ngram", "max_draft_tokens": most}
        return [*kinds, Kind("adaptive", adaptive, most)]
    by_head = {"speculative": f"eagle3:{head}", **fixed}
    for chain in arguments.chains:
        drafts = {**by_head, "max_draft_tokens": chain}
        kinds.append(Kind(f"head's chain of {chain}", drafts, most))
    for tree in arguments.tree:
        drafts = {**by_head, "draft_tree": tuple(tree)}
        kinds.append(Kind(f"tree of {sum(tree)}: {tree}", drafts, len(tree)))
    return kinds


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("config", type=Path, help="a Hugging Face config.json")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32, 64, 256])
    parser.add_argument("--acceptance", type=float, nargs="+", default=[1.0, 2.0, 3.0, 4.0])
    parser.add_argument("--chains", type=int, nargs="+", default=[3, 5])
    parser.add_argument(
        "--tree", type=int, nargs="+", action="append", help="drafts at each depth, 4 4 4 4 for 16"
    )
    parser.add_argument("--tokens", type=int, default=128, help="of a stream")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--layers", type=int, help="of the model, fewer than the config's")
    parser.add_argument("--tp", type=int, default=1)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    job = Job(arguments.config, "full", arguments.repeats, arguments.tp)
    with tempfile.TemporaryDirectory() as head:
        for kind in kinds_of(arguments, Path(head)):
            run_kind(job, kind, arguments, Path(head))


def run_kind(job: Job, kind: Kind, arguments: argparse.Namespace, head: Path) -> None:
    with job.model_folder() as folder:
        path = Path(folder) / "config.json"
        target = json.loads(path.read_text(encoding="utf-8"))
        if arguments.layers is not None:
            target["num_hidden_layers"] = arguments.layers
            path.write_text(json.dumps(target))
        write_head(head, target)
        start_s = time.perf_counter()
        engine = build(folder, arguments.tp, kind.drafts)
    print(json.dumps({"drafts": kind.name, "start_s": round(time.perf_counter() - start_s, 1)}))
    acceptance = [1.0] if kind.name == "plain" else arguments.acceptance
    measure(engine, kind.name, arguments, acceptance, kind.most_drafts)
    engine.close()
    del engine
    gc.collect()
    torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
