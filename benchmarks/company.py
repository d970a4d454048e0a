"""One request over and over among random neighbours, and how many different answers it gets.

Neighbours are of all lengths, some begin like the request, and come and go at any time; repeats
find their prompt in the cache, in part or not at all. Seeded. Knows no device.
"""

import random
import struct
from collections import Counter
from dataclasses import dataclass, field

from workers.engine.engine import Engine
from workers.engine.protocol import GenerateRequest, StepOutput
from workers.sampling.params import SamplingParams

_SHARE_OF_REPEATS = 0.5
_SHARE_OF_LIKE_PREFIXES = 0.3
_NUM_SALTS = 7
_PREFIX = "repeat-"

Answer = tuple[tuple[int, ...], bytes]
"""Tokens, and the bits of their log probabilities and of the likeliest tokens'."""


@dataclass(frozen=True, slots=True)
class CompanySpec:
    """The request, how often it is asked, how many requests there are at once, of which sizes and
    of which vocabulary."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    num_repeats: int
    num_live: int
    max_prompt_tokens: int
    max_output_tokens: int
    vocab_size: int
    seed: int = 0


@dataclass(slots=True)
class _Told:
    tokens: list[int] = field(default_factory=list)
    bits: bytes = b""

    def add(self, output: StepOutput) -> None:
        self.tokens += output.token_ids
        for entry in output.logprobs or ():
            values = (entry.logprob, *entry.top_logprobs)
            ids = (entry.rank, *entry.top_token_ids)
            self.bits += struct.pack(f"<{len(values)}f{len(ids)}q", *values, *ids)


def answers_in_company(engine: Engine, spec: CompanySpec) -> Counter[Answer]:
    """How often each answer came. Raises RuntimeError where a request fails."""
    rng = random.Random(spec.seed)
    answers: Counter[Answer] = Counter()
    told: dict[str, _Told] = {}
    num_asked = num_live = serial = 0
    while answers.total() < spec.num_repeats:
        while num_live < spec.num_live and num_asked < spec.num_repeats:
            is_repeat = rng.random() < _SHARE_OF_REPEATS
            request = _repeat(spec, serial) if is_repeat else _neighbour(spec, rng, serial)
            if is_repeat:
                told[request.request_id] = _Told()
            engine.submit(request)
            serial, num_live, num_asked = serial + 1, num_live + 1, num_asked + is_repeat
        for output in engine.step():
            if output.error is not None:
                raise RuntimeError(f"{output.request_id}: {output.error}")
            if output.request_id in told:
                told[output.request_id].add(output)
            if output.finish_reason is not None:
                num_live -= 1
                if (own := told.pop(output.request_id, None)) is not None:
                    answers[tuple(own.tokens), own.bits] += 1
    while engine.has_work:
        engine.step()
    return answers


def _repeat(spec: CompanySpec, serial: int) -> GenerateRequest:
    salt = str(serial % _NUM_SALTS)
    return GenerateRequest(f"{_PREFIX}{serial}", list(spec.prompt), spec.sampling, cache_salt=salt)


def _neighbour(spec: CompanySpec, rng: random.Random, serial: int) -> GenerateRequest:
    num_tokens = rng.randrange(1, spec.max_prompt_tokens + 1)
    prompt = [rng.randrange(3, spec.vocab_size) for _ in range(num_tokens)]
    if rng.random() < _SHARE_OF_LIKE_PREFIXES:
        prompt[:0] = spec.prompt[: rng.randrange(len(spec.prompt))]
    sampling = SamplingParams(
        temperature=rng.choice((0.0, 1.0)),
        top_p=rng.choice((1.0, 0.9)),
        presence_penalty=rng.choice((0.0, 0.5)),
        seed=serial,
        max_tokens=rng.randrange(1, spec.max_output_tokens + 1),
        ignore_eos=True,
        logprobs=rng.choice((None, 2)),
    )
    return GenerateRequest(str(serial), prompt, sampling, cache_salt=str(serial % _NUM_SALTS))
