"""Sampling states filled with requests in slots 0, 1, 2, ..., and one call that samples them."""

from collections.abc import Sequence

import numpy as np
import torch

from workers.sampling.params import SamplingParams
from workers.sampling.state import SampledTokens, SamplingState
from workers.scheduler.plan import AdmittedRequest

EOS = 2


def admitted(
    slot: int,
    sampling: SamplingParams,
    seed: int = 0,
    prompt: Sequence[int] = (5, 6),
    output: Sequence[int] = (),
) -> AdmittedRequest:
    return AdmittedRequest(
        slot=slot,
        seed=seed,
        sampling=sampling,
        num_prompt_tokens=len(prompt),
        prompt_ids=np.unique(prompt).astype(np.int32),
        output_ids=np.array(output, dtype=np.int32),
    )


def make_state(
    vocab_size: int, max_running_requests: int = 64, device: str = "cpu"
) -> SamplingState:
    return SamplingState(max_running_requests, vocab_size, (EOS,), torch.device(device))


def sample_each(
    logits: torch.Tensor,
    samplings: Sequence[SamplingParams],
    seeds: Sequence[int] | None = None,
    position: int = 2,
) -> SampledTokens:
    """Row i of logits under samplings[i] and seeds[i] (default i), in slot i."""
    state = make_state(logits.shape[1], len(samplings))
    seeds = range(len(samplings)) if seeds is None else seeds
    state.admit([admitted(i, s, seeds[i]) for i, s in enumerate(samplings)])
    slots = np.arange(len(samplings), dtype=np.int32)
    return state.sample(logits, slots, np.full(len(samplings), position, dtype=np.int32))


def random_logits(
    num_rows: int, vocab_size: int, scale: float = 3.0, seed: int = 0
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, vocab_size, generator=generator) * scale
