"""How many tokens does a step bring with each proposer, in text that the model makes up?

    python -m benchmarks.draft_acceptance [--prompts 24] [--max-draft-tokens 4] [--methods ...] \
        [--draft-quantization fp8]

The built-in model, greedy, on CPU, one request at a time behind the beginnings of held-out
documents. Texts are those without drafts. Prints, by proposer, the acceptance length (tokens of a
step of a row that had drafts), how often drafts of each place were right, those before them too,
and tokens a second, prompts included.
"""

import argparse
import sysconfig
import time
from pathlib import Path
from typing import get_args

from tokenizers import Tokenizer

from workers import Engine
from workers.builtin import builtin_model_path
from workers.builtin.corpus import collect_corpus, is_held_out
from workers.config import EngineConfig
from workers.engine.protocol import EngineStats
from workers.sampling.params import SamplingParams
from workers.speculation.config import DraftQuantization

METHODS = ("none", "ngram", "suffix", "draft:builtin-draft", "eagle3:builtin-head")
PROMPT_TOKENS = 64
SAMPLING = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)


def held_out_prompts(num_prompts: int) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(builtin_model_path() / "tokenizer.json"))
    documents = collect_corpus(Path(sysconfig.get_path("stdlib")))
    texts = [one.text for one in documents if is_held_out(one.group) and len(one.text) > 1000]
    encoded = tokenizer.encode_batch(texts[:num_prompts], add_special_tokens=False)
    return [one.ids[:PROMPT_TOKENS] for one in encoded]


def served(
    method: str,
    prompts: list[list[int]],
    max_draft_tokens: int,
    sampling: SamplingParams,
    enable_overlap: bool = True,
    draft_quantization: DraftQuantization | None = None,
) -> tuple[EngineStats, float]:
    """What an engine counted, and the tokens a second that it made. enable_overlap: the last steps
    of a text have fewer drafts than there is room for, as what holds is known one step late."""
    engine = Engine.from_config(
        EngineConfig(
            device="cpu",
            num_cpu_threads=1,
            enable_prefix_cache=False,
            enable_overlap=enable_overlap,
            speculative=None if method == "none" else method,
            draft_policy="fixed",
            max_draft_tokens=max_draft_tokens,
            draft_quantization=draft_quantization,
        )
    )
    try:
        started_s = time.perf_counter()
        num_tokens = sum(
            len(engine.generate([prompt], sampling)[0].token_ids) for prompt in prompts
        )
        return engine.stats(), num_tokens / (time.perf_counter() - started_s)
    finally:
        engine.close()


def row_of(
    method: str,
    prompts: list[list[int]],
    max_draft_tokens: int,
    draft_quantization: DraftQuantization | None,
) -> str:
    stats, rate = served(
        method, prompts, max_draft_tokens, SAMPLING, draft_quantization=draft_quantization
    )
    if not stats.num_drafted_runs:
        return f"| {method} | | | {rate:.0f} |"
    length = 1 + stats.num_accepted_draft_tokens / stats.num_drafted_runs
    shares = " ".join(f"{one / stats.num_drafted_runs:.0%}" for one in stats.accepted_by_position)
    return f"| {method} | {length:.2f} | {shares} | {rate:.0f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--max-draft-tokens", type=int, default=4)
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--draft-quantization", choices=get_args(DraftQuantization))
    arguments = parser.parse_args()
    prompts = held_out_prompts(arguments.prompts)
    quantization = arguments.draft_quantization
    print(
        f"{len(prompts)} prompts, {arguments.max_draft_tokens} drafts a step"
        + (f", by weights in {quantization}" if quantization else "")
    )
    print("| proposer | acceptance length | right, by place | tokens/s |")
    print("|---|---|---|---|")
    for method in arguments.methods:
        row = row_of(method, prompts, arguments.max_draft_tokens, quantization)
        print(row, flush=True)


if __name__ == "__main__":
    main()
