"""Speculative decoding beside plain decoding, with pretended acceptance: ms a token of a stream.

    python3 -m benchmarks.h200.speculative CONFIG_JSON [--head HEAD_JSON] [--kinds plain chains]

Random weights of the configs' shapes, one engine after the other in one process: without drafts,
with chains of fixed lengths, with trees, and with lengths chosen as they pay. An EAGLE-3 head
makes the drafts, or without --head n-grams are looked up, which are chains only. Which drafts are
right is drawn (pretended_runs.py), in one of two ways:

`--draw even`: a step of a row brings the whole part of --acceptance or one token more, as the
drivers of peers/ ask vLLM and SGLang for it. Times are a difference, as theirs (drafted_decode.py).

`--draw chance`: each draft is right with one and the same chance where those before it were, of
every kind the one by which the longest of --chains brings --acceptance tokens a step. Times are of
streams none of which ends (steady_decode.py). Lengths are chosen as they pay in this way only, as
for even draws a chain of two is as good as one of five; behind all others stands what share of the
fastest of these and of plain decoding they reach. --acceptance 1 2 3 4 is what they are held to.

One line of JSON a measurement.
"""

import argparse
import gc
import json
import logging
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch

from benchmarks.h200.drafted_decode import (
    FEW_TOKENS,
    DraftedDecode,
    DraftsAsked,
    add_decode_arguments,
)
from benchmarks.h200.driver import MAX_CONTEXT_LEN, MAX_RUNNING_REQUESTS, MEMORY_FRACTION
from benchmarks.h200.pretended_runs import (
    ChanceDraw,
    EvenDraw,
    PretendedRuns,
    chance_of,
    pretend,
)
from benchmarks.h200.steady_decode import SteadyDecode, shares_of_best
from workers.config import EngineConfig
from workers.engine.engine import Engine
from workers.parallel.local_engine import build_local_engine
from workers.sampling.params import SamplingParams
from workers.speculation.adaptive import AdaptiveLength
from workers.speculation.config import DraftQuantization

KINDS = ("plain", "chains", "adaptive", "trees")
_TREE = (4, 4, 4, 4)
_LEARNING_TOKENS = 384
"""Of a stream, while lengths are learnt."""


@dataclass(frozen=True, slots=True)
class Kind:
    """settings: of EngineConfig. num_drafts: of a row, 0 without drafts."""

    name: str
    settings: dict[str, Any]
    num_drafts: int

    @property
    def is_adaptive(self) -> bool:
        return self.settings.get("draft_policy") == "adaptive"


def kinds_of(arguments: argparse.Namespace, speculative: str) -> Iterator[Kind]:
    """As asked for, the largest steps last. speculative: as in EngineConfig."""
    if "plain" in arguments.kinds:
        yield Kind("plain", {}, 0)
    by = {"speculative": speculative, "draft_quantization": arguments.draft_quantization}
    fixed = {"draft_policy": "fixed"}
    if "chains" in arguments.kinds:
        for most in arguments.chains:
            yield Kind(f"chain of {most}", {**by, **fixed, "max_draft_tokens": most}, most)
    if "adaptive" in arguments.kinds:
        most = max(arguments.chains)
        settings = {**by, "draft_policy": "adaptive", "max_draft_tokens": most}
        yield Kind("adaptive", settings, most)
    for tree in arguments.tree if "trees" in arguments.kinds else []:
        name = f"tree of {'+'.join(map(str, tree))}"
        yield Kind(name, {**by, **fixed, "draft_tree": tuple(tree)}, sum(tree))


@contextmanager
def model_folders(arguments: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Folders with nothing but the configs, while engines are loaded from them: the model's, and
    what EngineConfig.speculative is."""
    with tempfile.TemporaryDirectory() as folder:
        model, head = Path(folder) / "model", Path(folder) / "head"
        config = json.loads(arguments.config.read_text(encoding="utf-8"))
        if arguments.layers is not None:
            config["num_hidden_layers"] = arguments.layers
        model.mkdir()
        (model / "config.json").write_text(json.dumps(config), encoding="utf-8")
        if arguments.head is None:
            yield str(model), "ngram"
            return
        head.mkdir()
        (head / "config.json").write_text(arguments.head.read_text(encoding="utf-8"))
        yield str(model), f"eagle3:{head}"


def build(folder: str, tp_size: int, kind: Kind) -> Engine:
    config = EngineConfig(
        model=folder,
        load_format="dummy",
        tp_size=tp_size,
        max_context_len=MAX_CONTEXT_LEN,
        gpu_memory_fraction=MEMORY_FRACTION,
        max_running_requests=MAX_RUNNING_REQUESTS,
        enable_prefix_cache=False,
        **kind.settings,
    )
    engine = build_local_engine(config, lambda done, total: None)
    while engine.prepare_while_idle():
        pass
    return engine


def measure(engine: Engine, kind: Kind, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """An engine that build has made, to the end of the kind's rows."""
    runs = PretendedRuns()
    if kind.num_drafts:
        pretend(engine, runs)
    decode = decode_of(engine, runs, arguments.draw)
    warm_up = _LEARNING_TOKENS if kind.is_adaptive else FEW_TOKENS
    for num_streams in arguments.streams:
        for wanted in arguments.acceptance if kind.num_drafts else [None]:
            if wanted is not None:
                by_chance = ChanceDraw(chance_of(wanted, max(arguments.chains)))
                runs.draw = by_chance if arguments.draw == "chance" else EvenDraw(wanted)
            policy = engine._scheduler._drafts
            if isinstance(policy, AdaptiveLength):
                # As at a start: what was learnt at another acceptance is worth nothing here.
                policy.__init__(kind.num_drafts)  # type: ignore[misc]
            asked = DraftsAsked("tessera", kind.name, 1 + kind.num_drafts, wanted)
            row = decode.row(asked, num_streams, arguments.tokens, arguments.repeats, warm_up)
            if isinstance(policy, AdaptiveLength):
                row["learnt"] = learnt_by(policy, num_streams)
            yield row


def learnt_by(policy: AdaptiveLength, num_streams: int) -> dict[str, list[float]]:
    """Since it began, by length: steps that it had, and what it thinks that one takes. By place:
    chances that so many drafts are right. key_ns: of a key in the cache."""
    seconds = policy._seconds
    costs_s = seconds.predict(num_streams, policy._keys_of(num_streams))
    return {
        "lengths": policy._lengths,
        "steps": seconds._counts[seconds._group(num_streams)].tolist(),
        "step_ms": [] if costs_s is None else (costs_s * 1e3).round(3).tolist(),
        "chances": policy._acceptance.chances().round(3).tolist(),
        "key_ns": [round(seconds._key_s * 1e9, 1)],
    }


def decode_of(engine: Engine, runs: PretendedRuns, draw: str) -> DraftedDecode | SteadyDecode:
    """draw: as --draw."""
    if draw == "chance":
        return SteadyDecode(engine, lambda: runs.held)

    def generate(prompts: list[list[int]], max_tokens: list[int]) -> list[int]:
        params = [
            SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in max_tokens
        ]
        return [len(result.token_ids) for result in engine.generate(prompts, params)]

    return DraftedDecode(generate, lambda: runs.held)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_decode_arguments(parser)
    parser.add_argument("--acceptance", type=float, nargs="+", default=[3.0], help="tokens a step")
    parser.add_argument("--head", type=Path, help="config.json of an EAGLE-3 head; none: n-grams")
    parser.add_argument(
        "--draft-quantization",
        choices=get_args(DraftQuantization),
        help="of the head's weights; none: 16 bits",
    )
    parser.add_argument("--kinds", nargs="+", choices=KINDS, help="default: all that there are")
    parser.add_argument("--chains", type=int, nargs="+", default=[3, 5])
    parser.add_argument(
        "--tree",
        type=int,
        nargs="+",
        action="append",
        help=f"drafts at each depth, default {' '.join(map(str, _TREE))}; once for each tree",
    )
    parser.add_argument("--draw", choices=("even", "chance"), default="even")
    parser.add_argument("--layers", type=int, help="of the model, fewer than the config's")
    parser.add_argument("--tp", type=int, default=1)
    arguments = parser.parse_args(argv)
    if arguments.head is None and (arguments.tree or "trees" in (arguments.kinds or ())):
        parser.error("trees are a head's: name its config.json by --head")
    if arguments.head is None and arguments.draft_quantization is not None:
        parser.error("weights to round are a head's: name its config.json by --head")
    is_even = arguments.draw == "even"
    if is_even and "adaptive" in (arguments.kinds or ()):
        parser.error(
            "lengths are chosen as they pay where drafts are right by chance: --draw chance"
        )
    if arguments.kinds is None:
        left_out = {"adaptive"} if is_even else set()
        left_out |= {"trees"} if arguments.head is None else set()
        arguments.kinds = [one for one in KINDS if one not in left_out]
    if arguments.tree is None:
        arguments.tree = [_TREE]
    return arguments


def main() -> None:
    arguments = parse_arguments()
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    rows = []
    with model_folders(arguments) as (folder, speculative):
        for kind in kinds_of(arguments, speculative):
            start_s = time.perf_counter()
            engine = build(folder, arguments.tp, kind)
            started = {
                "drafts": kind.name,
                "draft_quantization": kind.settings.get("draft_quantization"),
                "start_s": round(time.perf_counter() - start_s, 1),
            }
            print(json.dumps(started), flush=True)
            for row in measure(engine, kind, arguments):
                print(json.dumps(row), flush=True)
                rows.append(row)
            engine.close()
            del engine
            gc.collect()
            torch.cuda.empty_cache()
    for share in shares_of_best(rows):
        print(json.dumps(share), flush=True)


if __name__ == "__main__":
    main()
