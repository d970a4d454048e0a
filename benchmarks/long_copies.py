"""Does a drafter keep its acceptance in a long context?

    python -m benchmarks.long_copies [--context 1024 32768] [--device cpu] [--methods ...]

A model made by hand (benchmarks/copying_model.py) copies a text of tokens that come once each, from
its beginning: what is copied lies as far back as the context is long. Prints the tokens of a step
by proposer and context; with 4 drafts, 5 are all there can be, and the first and last steps have
fewer. Ends with 1 where a text is not the copy.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.copying_model import FIRST_ID, CopyingModel
from workers import Engine
from workers.config import EngineConfig
from workers.sampling.params import SamplingParams

METHODS = ("none", "ngram", "suffix", "draft", "eagle3")
NUM_DRAFTS = 4
NUM_OUTPUT_TOKENS = 60
_REPEATED = 4
"""Tokens of the prompt that are copies already."""
_PAGE_SIZE = 16


class NoCopyError(Exception):
    """The model, drafted for or not, did not go on with the copy."""


def prompt_of(num_tokens: int, vocab_size: int) -> list[int]:
    """FIRST_ID, tokens that come once, and the first _REPEATED of these once more."""
    generator = torch.Generator().manual_seed(1)
    once = (torch.randperm(vocab_size - 1, generator=generator) + 1).tolist()
    text = once[: num_tokens - 1 - _REPEATED]
    return [FIRST_ID, *text, *text[:_REPEATED]]


def tokens_a_step(folder: Path, context: int, method: str, device: str) -> float:
    """1 without drafts. Raises NoCopyError."""
    model = CopyingModel(vocab_size=context, max_context_len=context)
    target = model.save(folder / "target")
    spoken = {"none": None, "draft": f"draft:{target}"}.get(method, method)
    if method == "eagle3":
        spoken = f"eagle3:{model.save_head(folder / 'head')}"
    prompt = prompt_of(context - NUM_OUTPUT_TOKENS - NUM_DRAFTS - 1, context)
    engine = Engine.from_config(
        EngineConfig(
            model=str(target),
            device=device,
            page_size=_PAGE_SIZE,
            num_pages=2 * (context // _PAGE_SIZE + 2),
            max_running_requests=1,
            speculative=spoken,
            draft_policy="fixed",
            max_draft_tokens=NUM_DRAFTS,
        )
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True)
    try:
        written = engine.generate([prompt], sampling)[0].token_ids
        stats = engine.stats()
    finally:
        engine.close()
    copied = prompt[1 + _REPEATED :][:NUM_OUTPUT_TOKENS]
    if list(written) != copied:
        raise NoCopyError(f"{method} in {context} tokens: {written[:8]}, not {copied[:8]}")
    if not stats.num_drafted_runs:
        return 1.0
    return 1.0 + stats.num_accepted_draft_tokens / stats.num_drafted_runs


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--context", type=int, nargs="+", default=[1024, 32768])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    given = parser.parse_args(arguments)
    print("| proposer | " + " | ".join(f"{context:,} tokens" for context in given.context) + " |")
    print("|---|" + "---|" * len(given.context))
    for method in given.methods:
        cells = []
        for context in given.context:
            with tempfile.TemporaryDirectory() as folder:
                try:
                    steps = tokens_a_step(Path(folder), context, method, given.device)
                except NoCopyError as error:
                    print(error, file=sys.stderr)
                    return 1
                cells.append(f"{steps:.2f}")
        print(f"| {method} | " + " | ".join(cells) + " |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
