"""How many tokens does a step bring where the prompt holds the text that is to be changed?

    python -m benchmarks.edit_drafts [--prompts 24] [--max-draft-tokens 8]

The built-in model, greedy, on CPU: prompts are held-out documents of its corpus, a comment that one
name becomes another, and how the changed text begins. Texts are those without drafts. Prints, by
proposer, tokens a step of a row (those of rows without drafts counted, too), the acceptance length
(of rows that had drafts), the share of drafts that were wasted, and how much of the output is what
the edit asks for, from its beginning: a small model strays, and then there is less to look up.
"""

import argparse
import re
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer

from workers import Engine
from workers.builtin import builtin_model_path
from workers.builtin.corpus import collect_corpus, is_held_out
from workers.config import EngineConfig
from workers.sampling.params import SamplingParams

METHODS = ("ngram", "suffix")
TEXT_CHARS = 900
GIVEN_CHARS = 60
NEW_NAME = "renamed"
NAME = re.compile(r"\b[a-z_]{4,}\b")


class Edit(NamedTuple):
    """Token ids: what the model reads, and what it would write if it did as told."""

    prompt: list[int]
    wanted: list[int]


def held_out_edits(num_prompts: int) -> list[Edit]:
    tokenizer = Tokenizer.from_file(str(builtin_model_path() / "tokenizer.json"))
    documents = collect_corpus(Path(sysconfig.get_path("stdlib")))
    texts = [one.text for one in documents if is_held_out(one.group)]
    long_texts = [text[:TEXT_CHARS] for text in texts if len(text) > TEXT_CHARS][:num_prompts]
    return [_edit_of(text, tokenizer) for text in long_texts]


def _edit_of(text: str, tokenizer: Tokenizer) -> Edit:
    name = NAME.findall(text)[-1]
    changed = re.sub(rf"\b{name}\b", NEW_NAME, text)
    task = f"{text}\n\n# The same, but {name} is called {NEW_NAME}:\n\n{changed[:GIVEN_CHARS]}"
    prompt, wanted = tokenizer.encode_batch([task, changed[GIVEN_CHARS:]], add_special_tokens=False)
    return Edit(prompt.ids, wanted.ids)


def row_of(method: str, edits: Sequence[Edit], max_draft_tokens: int) -> str:
    """One request at a time, so that a step's tokens are a row's."""
    engine = Engine.from_config(
        EngineConfig(
            device="cpu",
            speculative=method,
            draft_policy="fixed",
            max_draft_tokens=max_draft_tokens,
        )
    )
    num_tokens = num_right = num_decode_steps = 0
    try:
        for prompt, wanted in edits:
            before = engine.stats().num_steps
            sampling = SamplingParams(temperature=0.0, max_tokens=len(wanted), ignore_eos=True)
            (result,) = engine.generate([prompt], sampling)
            # The prompt's own step brings the first token.
            num_decode_steps += engine.stats().num_steps - before - 1
            num_tokens += len(result.token_ids) - 1
            num_right += _num_alike(result.token_ids, wanted)
        stats = engine.stats()
    finally:
        engine.close()
    accepted, drafted = stats.num_accepted_draft_tokens, stats.num_draft_tokens
    return (
        f"| {method} | {num_tokens / num_decode_steps:.2f} | "
        f"{1 + accepted / stats.num_drafted_runs:.2f} | {1 - accepted / drafted:.0%} | "
        f"{num_right / sum(len(edit.wanted) for edit in edits):.0%} |"
    )


def _num_alike(left: Sequence[int], right: Sequence[int]) -> int:
    pairs = enumerate(zip(left, right, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(left), len(right)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--max-draft-tokens", type=int, default=8)
    arguments = parser.parse_args()
    edits = held_out_edits(arguments.prompts)
    print(f"{len(edits)} prompts, at most {arguments.max_draft_tokens} drafts a step")
    print("| proposer | tokens a step | acceptance length | wasted drafts | as asked for |")
    print("|---|---|---|---|---|")
    for method in METHODS:
        print(row_of(method, edits, arguments.max_draft_tokens), flush=True)


if __name__ == "__main__":
    main()
