"""One token's decode step with four-bit weights: which tiles, found in the engine itself.

    python3 -m benchmarks.h200.kept_engine [benchmarks/h200/models/llama-3.1-8b-gptq.json]

kept_chain.py measures a chain of layers with something else in attention's place; a layer takes
longer in the engine than there, and it is the engine that counts. One engine of random weights: for
each group of products that a table's rule names (gate and up; o and down; qkv) each of the tiles in
its place, the graph of one stream captured anew, the others being the best so far. Milliseconds a
token at one stream of 1,024 and more, from the better of two runs each. Kernels are compiled first,
in several processes; what is wrong is told and tried all the same.
"""

import argparse
import random
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from benchmarks.h200.driver import MAX_CONTEXT_LEN, MEMORY_FRACTION
from benchmarks.h200.kept_chain import MAX_PROCESSES, Way, compile_ways
from benchmarks.h200.product_candidates import one_row_worth_trying
from benchmarks.h200.workloads import LOWEST_TOKEN_ID, VOCAB_SIZE
from workers.config import EngineConfig
from workers.engine.engine import Engine
from workers.layers.quantised.skinny_shape import GemvTiles, SkinnyTiles
from workers.layers.quantised.tile_table import TileRule
from workers.parallel.group import SingleRank
from workers.runner.factory import make_model_runner
from workers.sampling.params import SamplingParams

FORMAT = "int4"
GROUPS = {"gate_up": ("gate_up",), "o_down": ("o", "down"), "qkv": ("qkv",)}
"""Roles of a layer that one rule of a table names."""
PROMPT_TOKENS = 1024
FEW_TOKENS, MANY_TOKENS = 16, 272
REPEATS = 2


def tiles_of() -> list[SkinnyTiles]:
    return [one for one in one_row_worth_trying(FORMAT) if isinstance(one, GemvTiles)]


def compile_all(tried: Sequence[SkinnyTiles]) -> None:
    works = [
        (FORMAT, role, [Way(one, is_gated=role == "gate_up")])
        for one in tried
        for roles in GROUPS.values()
        for role in roles
    ]
    with ProcessPoolExecutor(MAX_PROCESSES, mp_context=get_context("spawn")) as processes:
        list(processes.map(compile_ways, works))


class TunedEngine:
    """One stream of an engine whose products take the tiles that they are given."""

    def __init__(self, folder: str) -> None:
        config = EngineConfig(
            model=folder,
            load_format="dummy",
            max_context_len=MAX_CONTEXT_LEN,
            gpu_memory_fraction=MEMORY_FRACTION,
            max_running_requests=1,
            enable_prefix_cache=False,
            attention_timing_interval_steps=0,
        )
        device = torch.device("cuda", 0)
        self._runner: Any = make_model_runner(
            config, SingleRank(), device, lambda done, total: None
        )
        self._engine = Engine.of_runner(config, self._runner)
        while self._engine.prepare_while_idle():
            pass
        rng = random.Random(1)
        self._prompt = [rng.randrange(LOWEST_TOKEN_ID, VOCAB_SIZE) for _ in range(PROMPT_TOKENS)]

    def close(self) -> None:
        self._engine.close()

    def use(self, group: str, tiles: SkinnyTiles) -> None:
        for product, name in self._tables(group):
            many = tuple(rule for rule in getattr(product, name) if rule.max_rows > 1)
            setattr(product, name, (TileRule(1, tiles), *many))
        graphs = self._runner._graphs
        for key in list(graphs._graphs):
            graphs._missing.append(key)
            graphs._capture_key(key)

    def ms_a_token(self) -> float:
        span = MANY_TOKENS - FEW_TOKENS
        few = min(self._seconds(FEW_TOKENS) for _ in range(REPEATS))
        many = min(self._seconds(MANY_TOKENS) for _ in range(REPEATS))
        return (many - few) / span * 1e3

    def _seconds(self, num_tokens: int) -> float:
        sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        start_s = time.perf_counter()
        self._engine.generate([self._prompt], [sampling])
        return time.perf_counter() - start_s

    def _tables(self, group: str) -> Iterator[tuple[Any, str]]:
        """Each product of the group, and which attribute has its table."""
        for layer in self._runner._model._layers:
            if group == "gate_up":
                yield layer.mlp.gate_up._product, "_gated_table"
            elif group == "o_down":
                yield layer.o, "_table"
                yield layer.mlp.last, "_table"
            else:
                yield layer.qkv, "_table"


def best_tiles(engine: TunedEngine, group: str, tried: Sequence[SkinnyTiles]) -> SkinnyTiles:
    """Prints a line for each of the tiles; the fastest is in use from here on."""
    found: list[tuple[float, SkinnyTiles]] = []
    for tiles in tried:
        engine.use(group, tiles)
        found.append((engine.ms_a_token(), tiles))
        print(f"{group} {found[-1][0]:.4f} ms: {tiles}", flush=True)
    best_ms, best = min(found, key=lambda one: one[0])
    engine.use(group, best)
    print(f"best {group}: {best_ms:.4f} ms, again {engine.ms_a_token():.4f}: {best}", flush=True)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    default = Path("benchmarks/h200/models/llama-3.1-8b-gptq.json")
    parser.add_argument("config", type=Path, nargs="?", default=default)
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--kinds", nargs="+", default=None, help="classes of tiles, all by default")
    arguments = parser.parse_args()
    tried = [
        one
        for one in tiles_of()
        if arguments.kinds is None or type(one).__name__ in arguments.kinds
    ]
    compile_all(tried)
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(arguments.config, Path(folder) / "config.json")
        engine = TunedEngine(folder)
    print(f"as the tables have it: {engine.ms_a_token():.4f} ms", flush=True)
    for group in arguments.groups:
        best_tiles(engine, group, tried)
    engine.close()


if __name__ == "__main__":
    main()
