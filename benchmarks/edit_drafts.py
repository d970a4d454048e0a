"""How many tokens does a step bring where the prompt holds the text that is to be changed?

    python -m benchmarks.edit_drafts [--prompts 24] [--max-draft-tokens 8]

On CPU: prompts are held-out documents of the built-in model's corpus, a comment that one name
becomes another, and how the changed text begins. Two kinds of output: what the built-in model says,
greedy, of which a share repeats the prompt (runs of 8 tokens that stand in it), but hardly any is
the change that was asked for; and what a model would say that does as told, for proposers that only
look text up. Prints, by proposer, tokens a step of a row (those of rows without drafts counted,
too), the acceptance length (of rows that had drafts), the share of drafts that were wasted, how
much repeats the prompt, and tokens a step where the output is as asked for.
"""

import argparse
import re
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from tokenizers import Tokenizer

from workers import Engine
from workers.builtin import builtin_model_path
from workers.builtin.corpus import collect_corpus, is_held_out
from workers.config import EngineConfig
from workers.sampling.params import SamplingParams
from workers.scheduler.plan import AdmittedRequest
from workers.speculation.config import METHODS_WITH_MODEL, SpeculativeConfig
from workers.speculation.factory import make_proposer
from workers.speculation.history import TokenHistory
from workers.speculation.proposer import DraftRows, ObservedStep, Proposer

METHODS = ("ngram", "suffix", "draft:builtin-draft")
REPEATED_TOKENS = 8
MAX_CONTEXT_LEN = 4096
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
    num_tokens = num_decode_steps = 0
    repeated = []
    try:
        for prompt, wanted in edits:
            before = engine.stats().num_steps
            sampling = SamplingParams(temperature=0.0, max_tokens=len(wanted), ignore_eos=True)
            (result,) = engine.generate([prompt], sampling)
            # The prompt's own step brings the first token.
            num_decode_steps += engine.stats().num_steps - before - 1
            num_tokens += len(result.token_ids) - 1
            repeated += _repeats(result.token_ids, prompt)
        stats = engine.stats()
    finally:
        engine.close()
    accepted, drafted = stats.num_accepted_draft_tokens, stats.num_draft_tokens
    return (
        f"| {method} | {num_tokens / num_decode_steps:.2f} | "
        f"{1 + accepted / stats.num_drafted_runs:.2f} | {1 - accepted / drafted:.0%} | "
        f"{sum(repeated) / len(repeated):.0%} | {_as_told(method, edits, max_draft_tokens)} |"
    )


def _repeats(output: Sequence[int], prompt: Sequence[int]) -> list[bool]:
    """Of each run of REPEATED_TOKENS in the output, whether it stands in the prompt."""
    known = set(_runs(prompt))
    return [run in known for run in _runs(output)]


def _runs(token_ids: Sequence[int]) -> list[tuple[int, ...]]:
    ends = range(REPEATED_TOKENS, len(token_ids) + 1)
    return [tuple(token_ids[end - REPEATED_TOKENS : end]) for end in ends]


def _as_told(method: str, edits: Sequence[Edit], max_draft_tokens: int) -> str:
    """Tokens a step where outputs are the wanted texts; a dash for proposers that run a model."""
    known = SpeculativeConfig.parse(method, max_draft_tokens, "fixed").method
    if known in METHODS_WITH_MODEL:
        return "-"
    history = TokenHistory(1, MAX_CONTEXT_LEN, torch.device("cpu"))
    proposer = make_proposer(known, history)
    num_steps = sum(_told_steps(proposer, history, edit, max_draft_tokens) for edit in edits)
    return f"{sum(len(edit.wanted) - 1 for edit in edits) / num_steps:.2f}"


def _told_steps(proposer: Proposer, history: TokenHistory, edit: Edit, most: int) -> int:
    """Steps behind the prompt's own one, played without a model."""
    text = np.array(edit.prompt + edit.wanted, dtype=np.int32)
    begun = len(edit.prompt) + 1
    request = AdmittedRequest(0, 0, SamplingParams(), len(edit.prompt), known_ids=text[: begun - 1])
    proposer.admit([request])
    history.admit([request])
    history.token_ids[0, : len(text)] = torch.from_numpy(text)
    slots = np.zeros(1, dtype=np.int32)
    num_steps = 0
    while begun < len(text):
        lens = np.array([begun], dtype=np.int32)
        limits = np.array([min(most, max(len(text) - begun - 1, 1))], dtype=np.int32)
        drafts = proposer.propose(DraftRows(slots, lens, limits))
        made = drafts.token_ids[0, : int(drafts.num_drafts[0])].tolist()
        num_held = 1 + _num_alike(made, text[begun:].tolist())
        begun = min(begun + num_held, len(text))
        held, last = torch.tensor([num_held]), torch.tensor([int(text[begun - 1])])
        proposer.observe(ObservedStep(slots, lens - np.int32(1), held, last))
        num_steps += 1
    return num_steps


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
    print(
        "| proposer | tokens a step | acceptance length | wasted drafts | repeats the prompt "
        "| tokens a step, output as told |"
    )
    print("|---|---|---|---|---|---|")
    for method in METHODS:
        print(row_of(method, edits, arguments.max_draft_tokens), flush=True)


if __name__ == "__main__":
    main()
