"""One token's decode step with four-bit weights: which tiles, found in the engine itself.

    python3 -m benchmarks.h200.kept_engine [benchmarks/h200/models/llama-3.1-8b-gptq.json]

kept_chain.py measures a chain of layers with something else in attention's place; a layer takes
longer in the engine than there, and it is the engine that counts. One engine of random weights: for
each of a layer's products (gate and up in one, o, down, qkv) each of the tiles in its place, the
graph of one stream captured anew, the others being the best so far. Milliseconds a token at one
stream of 1,024 and more, from the better of two runs each. Kernels are compiled first, in several
processes, and run once: tiles whose product is wrong are told and not tried. Needs Hopper.
"""

import argparse
import random
import shutil
import tempfile
import time
from collections.abc import Hashable, Iterator, Sequence
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
from workers.layers.quantised.int4_mma import mma_shape
from workers.layers.quantised.skinny_shape import MmaTiles
from workers.layers.quantised.tile_table import TileRule, TileTable
from workers.parallel.group import SingleRank
from workers.runner.factory import make_model_runner
from workers.sampling.params import SamplingParams

FORMAT = "int4"
ROLES = ("gate_up", "o", "down", "qkv")
"""A layer's products."""
PROMPT_TOKENS = 1024
FEW_TOKENS, MANY_TOKENS = 16, 272
REPEATS = 2


def tiles_worth_trying() -> list[MmaTiles]:
    return [one for one in one_row_worth_trying(FORMAT) if isinstance(one, MmaTiles)]


def right_tiles(tried: Sequence[MmaTiles], roles: Sequence[str]) -> dict[str, list[MmaTiles]]:
    """Of each role those whose product is right. Compiles them."""
    ways = [(role, one) for role in roles for one in tried]
    works = [(FORMAT, role, [Way(one, is_gated=role == "gate_up")]) for role, one in ways]
    with ProcessPoolExecutor(MAX_PROCESSES, mp_context=get_context("spawn")) as processes:
        found = list(processes.map(compile_ways, works))
    right = {way for way, is_right in zip(ways, found, strict=True) if is_right == [True]}
    return {role: [one for one in tried if (role, one) in right] for role in roles}


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
        self._tabled: dict[tuple[int, str], TileTable] = {}
        while self._engine.prepare_while_idle():
            pass
        rng = random.Random(1)
        self._prompt = [rng.randrange(LOWEST_TOKEN_ID, VOCAB_SIZE) for _ in range(PROMPT_TOKENS)]

    def close(self) -> None:
        self._engine.close()

    def use(self, role: str, tiles: MmaTiles | None) -> None:
        """None: what the tables had at first."""
        for product, name in self._tables(role):
            tabled = self._tabled.setdefault((id(product), name), getattr(product, name))
            many = tuple(rule for rule in tabled if rule.max_rows > 1)
            setattr(product, name, tabled if tiles is None else (TileRule(1, tiles), *many))
        self._capture()

    def ms_a_token(self) -> float:
        span = MANY_TOKENS - FEW_TOKENS
        few = min(self._seconds(FEW_TOKENS) for _ in range(REPEATS))
        many = min(self._seconds(MANY_TOKENS) for _ in range(REPEATS))
        return (many - few) / span * 1e3

    def kernel(self, role: str, tiles: MmaTiles) -> Hashable:
        """What the product is compiled for."""
        product, _ = next(self._tables(role))
        return _compiled_for(product, tiles, role == "gate_up")

    def _capture(self) -> None:
        graphs = self._runner._graphs
        for key in list(graphs._graphs):
            graphs._missing.append(key)
            graphs._capture_key(key)

    def _seconds(self, num_tokens: int) -> float:
        sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        start_s = time.perf_counter()
        self._engine.generate([self._prompt], [sampling])
        return time.perf_counter() - start_s

    def _tables(self, role: str) -> Iterator[tuple[Any, str]]:
        """Each layer's product, and which attribute has its table."""
        for layer in self._runner._model._layers:
            if role == "gate_up":
                yield layer.mlp.gate_up.product, "_gated_table"
            elif role == "o":
                yield layer.o, "_table"
            elif role == "down":
                yield layer.mlp.last, "_table"
            else:
                yield layer.qkv, "_table"


def use_best(engine: TunedEngine, role: str, tried: Sequence[MmaTiles]) -> None:
    """Prints a line for the tables' tiles and for each kernel of tried; the fastest stay in use."""
    found: list[tuple[float, MmaTiles | None]] = []
    different = {engine.kernel(role, tiles): tiles for tiles in reversed(tried)}
    for tiles in (None, *reversed(different.values())):
        engine.use(role, tiles)
        found.append((engine.ms_a_token(), tiles))
        print(f"{role} {found[-1][0]:.4f} ms: {_told(tiles)}", flush=True)
    best_ms, best = min(found, key=lambda one: one[0])
    engine.use(role, best)
    again_ms = engine.ms_a_token()
    print(f"best {role}: {best_ms:.4f} ms, again {again_ms:.4f}: {_told(best)}", flush=True)


def _compiled_for(product: Any, tiles: MmaTiles, is_gated: bool) -> Hashable:
    can_split = product._can_split and not is_gated
    shape = tiles.of(product._out_features, product.in_features, product._turn, 1, can_split)
    made = mma_shape(product._kept, shape, is_gated)
    return made, shape.num_splits, shape.max_registers


def _told(tiles: MmaTiles | None) -> str:
    return "as the tables have it" if tiles is None else str(tiles)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    default = Path("benchmarks/h200/models/llama-3.1-8b-gptq.json")
    parser.add_argument("config", type=Path, nargs="?", default=default)
    parser.add_argument("--roles", nargs="+", choices=ROLES, default=list(ROLES))
    arguments = parser.parse_args()
    tried = right_tiles(tiles_worth_trying(), arguments.roles)
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(arguments.config, Path(folder) / "config.json")
        engine = TunedEngine(folder)
    for role in arguments.roles:
        use_best(engine, role, tried[role])
    engine.close()


if __name__ == "__main__":
    main()
