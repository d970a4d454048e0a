"""How many tokens does a step bring by trees of drafts, beside chains of as many passes?

    python -m benchmarks.draft_trees [--prompts 8] [--output-len 100] [--temperature 0 1]

The built-in model and its draft model, on CPU: held-out documents of its corpus, cut to 100 tokens,
one request at a time. Prints, by proposer and tree (drafts at each depth), the acceptance length
(tokens a step of rows that had drafts) at each temperature.
"""

import argparse
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from workers import Engine
from workers.builtin import builtin_model_path
from workers.builtin.corpus import collect_corpus, is_held_out
from workers.config import EngineConfig
from workers.sampling.params import SamplingParams

PROMPT_TOKENS = 100
CHAIN = 4
DRAFT, SUFFIX = "draft:builtin-draft", "suffix"
SHAPES: tuple[tuple[str, tuple[int, ...]], ...] = (
    (DRAFT, ()),
    (DRAFT, (2, 2, 2, 2)),
    (DRAFT, (4, 4, 4, 4)),
    (SUFFIX, ()),
    (SUFFIX, (4, 4, 4, 4)),
)


def held_out_prompts(num_prompts: int) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(builtin_model_path() / "tokenizer.json"))
    documents = collect_corpus(Path(sysconfig.get_path("stdlib")))
    texts = [one.text[:1000] for one in documents if is_held_out(one.group)]
    encoded = tokenizer.encode_batch(texts[:num_prompts], add_special_tokens=False)
    return [one.ids[:PROMPT_TOKENS] for one in encoded]


def acceptance_length(
    method: str, tree: tuple[int, ...], prompts: Sequence[list[int]], sampling: SamplingParams
) -> float:
    engine = Engine.from_config(
        EngineConfig(
            device="cpu",
            speculative=method,
            draft_policy="fixed",
            max_draft_tokens=CHAIN,
            draft_tree=tree,
        )
    )
    try:
        for prompt in prompts:
            engine.generate([prompt], sampling)
        stats = engine.stats()
    finally:
        engine.close()
    return 1 + stats.num_accepted_draft_tokens / stats.num_drafted_runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--output-len", type=int, default=100)
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    arguments = parser.parse_args()
    prompts = held_out_prompts(arguments.prompts)
    print("| proposer | drafts | " + " | ".join(f"at {t:g}" for t in arguments.temperature) + " |")
    print("|---|---|" + "---|" * len(arguments.temperature))
    for method, tree in SHAPES:
        lengths = [
            acceptance_length(
                method,
                tree,
                prompts,
                SamplingParams(
                    temperature=temperature,
                    seed=1,
                    max_tokens=arguments.output_len,
                    ignore_eos=True,
                ),
            )
            for temperature in arguments.temperature
        ]
        shape = "+".join(map(str, tree)) if tree else f"chain of {CHAIN}"
        cells = " | ".join(f"{length:.2f}" for length in lengths)
        print(f"| {method} | {shape} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
