"""Makes the texts that an EAGLE-3 head is trained on, for train_eagle to read.

    python -m workers.builtin.eagle_texts --out FILE [--num-prompts 30000] [--time-limit-s 3600]
    python -m workers.builtin.eagle_texts --out FILE --target FOLDER --prompts FILE

The target speaks greedily behind prompts, served by this project's engine, whose batches stay full
while texts end; for the built-in model documents and conversations of its corpus come on top, as
they are. FILE is written again with every group of prompts, so that a run may be ended at any time.
Knows no head.
"""

import argparse
import sysconfig
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tokenizers import Tokenizer

from workers import Engine
from workers.builtin import builtin_model_path
from workers.builtin.eagle_data import OwnText, TextSet
from workers.builtin.eagle_prompts import Prompts, builtin_prompts, builtin_reading, file_prompts
from workers.config import EngineConfig
from workers.sampling.params import SamplingParams


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs until all prompts have their answers or the time is spent."""
    options = _options(arguments)
    started = time.monotonic()
    folder = options.target or builtin_model_path()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompts = _prompts(options, tokenizer)
    texts = TextSet(_reading(options, tokenizer), [])
    _say(started, f"{len(texts.train)} texts to read, {len(prompts.train)} prompts")
    engine = Engine.from_config(
        EngineConfig(
            model=str(folder) if options.target else "builtin",
            device=options.device,
            num_cpu_threads=options.num_cpu_threads,
            enable_prefix_cache=False,
            max_running_requests=options.batch_size,
        )
    )
    try:
        texts.held_out.extend(own_texts(engine, prompts.held_out, options.answer_tokens))
        for first in range(0, len(prompts.train), options.group_size):
            group = prompts.train[first : first + options.group_size]
            texts.train.extend(own_texts(engine, group, options.answer_tokens))
            texts.save(options.out)
            num_said = sum(text.num_said for text in texts.train)
            _say(started, f"{num_said} tokens said, {options.out.stat().st_size} bytes")
            if time.monotonic() - started > options.time_limit_s:
                break
    finally:
        engine.close()


def own_texts(
    engine: Engine, prompts: Sequence[Sequence[int]], num_tokens: int
) -> Iterator[OwnText]:
    """What the engine's model says greedily behind each prompt: num_tokens at most, a token that
    ends it included."""
    results = engine.generate(prompts, SamplingParams(temperature=0.0, max_tokens=num_tokens))
    for prompt, result in zip(prompts, results, strict=True):
        yield OwnText([*prompt, *result.token_ids], len(prompt))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m workers.builtin.eagle_texts",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, help="the file, .npz")
    add("--target", type=Path, help="a model folder; else the built-in model")
    add("--prompts", type=Path, help="a file with a prompt a line; else the built-in corpus")
    add("--stdlib", type=Path, default=Path(sysconfig.get_paths()["stdlib"]), help="as of train")
    add("--device", default="cpu", help="cpu (float32) or cuda (the checkpoint's dtype)")
    add("--num-cpu-threads", type=int, default=1)
    add("--seed", type=int, default=0, help="of prompts and of what is read")
    add("--num-prompts", type=int, default=30000, help="held-out ones come on top")
    add("--num-held-out", type=int, default=480)
    add("--answer-tokens", type=int, default=128, help="that the target says at most")
    add("--read-tokens", type=int, default=3_000_000, help="of the built-in corpus, at most")
    add("--batch-size", type=int, default=128, help="requests that run together")
    add("--group-size", type=int, default=1024, help="prompts between two writes of the file")
    add("--time-limit-s", type=float, default=3600.0, help="no group begins beyond this")
    return parser.parse_args(arguments)


def _prompts(options: argparse.Namespace, tokenizer: Tokenizer) -> Prompts:
    num, num_held_out = options.num_prompts, options.num_held_out
    if options.prompts is not None:
        return file_prompts(tokenizer, options.prompts, num, num_held_out, options.seed)
    return builtin_prompts(tokenizer, options.stdlib, num, num_held_out, options.seed)


def _reading(options: argparse.Namespace, tokenizer: Tokenizer) -> list[OwnText]:
    if options.prompts is not None:
        return []
    texts = builtin_reading(tokenizer, options.stdlib, options.read_tokens, options.seed)
    return [OwnText(ids, len(ids)) for ids in texts]


def _say(started: float, text: str) -> None:
    print(f"[{time.monotonic() - started:6.1f} s] {text}", flush=True)


if __name__ == "__main__":
    main()
