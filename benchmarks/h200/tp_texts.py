"""Greedy texts of one engine over some GPUs, into a file that tp_agreement.py compares.

    python3 -m benchmarks.h200.tp_texts OUT.json --tp 2 --dtype bfloat16

The built-in model goes on with pieces of files that it was not trained on; any other --model, a
folder, with random tokens. CUDA graphs are captured before the first prompt. Where it takes longer
than --dump-s, standard error shows what every thread waits for.
"""

import argparse
import faulthandler
import json
import logging
import random
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.h200.text_agreement import LENGTHS, held_out_documents
from benchmarks.h200.text_comparison import cut_prompts
from workers.builtin import builtin_model_path
from workers.config import EngineConfig
from workers.parallel.local_engine import build_local_engine
from workers.sampling.params import SamplingParams

BUILTIN = "builtin"
RANDOM_LENGTHS = (2, 9, 33, 64)
NUM_PAGES = {"torch_native": 4000, None: 600}
"""By attention backend: the built-in model's own page size is 128, torch_native's 16."""


@dataclass(frozen=True, slots=True)
class EngineTexts:
    """What one engine said. model: a folder's path."""

    model: str
    dtype: str
    tp_size: int
    has_peer_memory: bool
    prompts: list[list[int]]
    texts: list[list[int]]

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> "EngineTexts":
        return cls(**json.loads(path.read_text(encoding="utf-8")))

    @property
    def name(self) -> str:
        way = " over peer memory" if self.has_peer_memory else " over NCCL"
        return f"{self.dtype}, TP {self.tp_size}{way if self.tp_size > 1 else ''}"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default=BUILTIN)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--backend", default=None, help="attention backend, default automatic")
    parser.add_argument("--no-peer-memory", action="store_true", help="ranks add up by NCCL")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--dump-s", type=float, default=35.0)
    return parser.parse_args()


def prompts_for(model: str, number: int) -> list[list[int]]:
    """Seeded: the same for every engine."""
    if model == BUILTIN:
        return cut_prompts(held_out_documents(builtin_model_path()), LENGTHS, number)
    config = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
    rng = random.Random(7)
    return [
        [rng.randrange(3, config["vocab_size"]) for _ in range(length)]
        for length in (RANDOM_LENGTHS * number)[:number]
    ]


def texts_of(arguments: argparse.Namespace, prompts: list[list[int]]) -> list[list[int]]:
    engine = build_local_engine(
        EngineConfig(
            model=arguments.model,
            dtype=arguments.dtype,
            device=arguments.device,
            tp_size=arguments.tp,
            attention_backend=arguments.backend,
            num_pages=NUM_PAGES.get(arguments.backend, NUM_PAGES[None]),
            enable_prefix_cache=False,
            enable_peer_memory=not arguments.no_peer_memory,
        ),
        lambda done, total: None,
    )
    logging.info("engine: attention %s", engine.info.attention_backend)
    num_prepared = 0
    while engine.prepare_while_idle():
        num_prepared += 1
    logging.info("engine: %d turns of preparing", num_prepared)
    params = SamplingParams(temperature=0.0, max_tokens=arguments.tokens, ignore_eos=True)
    texts = [result.token_ids for result in engine.generate(prompts, params)]
    engine.check_integrity()
    engine.close()
    return texts


def main() -> None:
    arguments = parse_arguments()
    faulthandler.dump_traceback_later(arguments.dump_s, exit=False)
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(name)s: %(message)s"
    )
    prompts = prompts_for(arguments.model, arguments.prompts)
    texts = texts_of(arguments, prompts)
    model = str(builtin_model_path()) if arguments.model == BUILTIN else arguments.model
    has_peer_memory = not arguments.no_peer_memory
    found = EngineTexts(model, arguments.dtype, arguments.tp, has_peer_memory, prompts, texts)
    found.write(arguments.out)
    logging.info("%s: %d texts written", found.name, len(texts))


if __name__ == "__main__":
    main()
