"""Engines of the built-in model on a GPU, and how far their text is from Transformers'."""

import random
from itertools import zip_longest

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from workers.builtin import builtin_model_path
from workers.engine.engine import Engine
from workers.sampling.params import SamplingParams

CUDA = torch.device("cuda", 0)
NUM_TOKENS = 32
NEAR_TIE = 0.25
BUILTIN = {"model": "builtin", "max_running_requests": 32}
"""Few requests: many processes share a GPU, and a pool is as large as all requests could use."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
MIXED = [
    GREEDY,
    SamplingParams(temperature=0.8, top_p=0.9, seed=5, max_tokens=NUM_TOKENS, ignore_eos=True),
    SamplingParams(temperature=0.0, presence_penalty=0.7, max_tokens=NUM_TOKENS, ignore_eos=True),
    SamplingParams(temperature=0.0, logprobs=3, max_tokens=NUM_TOKENS, ignore_eos=True),
]


def prompts_of(num, vocab_size, longest=200):
    rng = random.Random(7)
    return [
        [rng.randrange(3, vocab_size) for _ in range(rng.randrange(2, longest))] for _ in range(num)
    ]


def generate(config, prompts, sampling, rounds=1):
    engine = Engine.from_config(config)
    try:
        for _ in range(rounds):
            results = engine.generate(prompts, sampling)
        engine.check_integrity()
        return [result.token_ids for result in results]
    finally:
        engine.close()


def gaps_to_likeliest(prompts, outputs):
    """How far below the likeliest token's logit transformers puts each chosen token, bfloat16."""
    reference = AutoModelForCausalLM.from_pretrained(builtin_model_path(), dtype=torch.bfloat16)
    reference = reference.eval().to(CUDA)
    gaps = []
    for prompt, tokens in zip(prompts, outputs, strict=True):
        text = torch.tensor([prompt + tokens], device=CUDA)
        with torch.inference_mode():
            logits = reference(text).logits[0, len(prompt) - 1 : -1].float()
        chosen = logits.gather(1, text[0, len(prompt) :, None]).squeeze(1)
        gaps.append((logits.max(dim=-1).values - chosen).cpu().numpy())
    return np.concatenate(gaps)


def share_equal(ours, theirs):
    """The share of positions with equal tokens; of those that one text lacks, none is equal."""
    pairs = [zip_longest(x, y) for x, y in zip(ours, theirs, strict=True)]
    return float(np.mean([a == b for row in pairs for a, b in row]))
