"""Log probabilities of prompts for fakes: packed from entries, and back."""

from collections.abc import Sequence

import numpy as np

from workers.engine.logprobs import PackedLogprobs, TokenLogprobs
from workers.engine.protocol import StepOutput


def pack(entries: Sequence[TokenLogprobs]) -> PackedLogprobs:
    """entries: all with one number of alternatives, of float32 values."""
    return PackedLogprobs(
        len(entries[0].top_token_ids) if entries else 0,
        np.array([entry.logprob for entry in entries], "<f4").tobytes(),
        np.array([entry.rank for entry in entries], "<i4").tobytes(),
        np.array([entry.top_token_ids for entry in entries], "<i4").tobytes(),
        np.array([entry.top_logprobs for entry in entries], "<f4").tobytes(),
    )


def prompt_entries(output: StepOutput) -> list[TokenLogprobs | None] | None:
    """One a prompt token, as offline results have them."""
    if output.prompt_logprobs is None:
        return None
    return [None, *output.prompt_logprobs.unpack()]
