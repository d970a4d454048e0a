"""Tokens of a full batch, from every stream's first token until the first stream has its last."""

import random
import time
from collections.abc import Sequence

from workers.adapters.ref import AdapterRef
from workers.engine.engine import Engine
from workers.engine.protocol import GenerateRequest
from workers.sampling.params import SamplingParams

VOCAB_SIZE = 100_000
PROMPT_TOKENS = 256


def tokens_a_second(
    engine: Engine,
    num_streams: int,
    num_tokens: int,
    adapters: Sequence[AdapterRef | None] = (None,),
    vocab_size: int = VOCAB_SIZE,
) -> float:
    """Of all streams together, greedy, behind random prompts. adapters: of the streams, by turns.

    Raises RuntimeError where a request fails.
    """
    rng = random.Random(num_streams)
    sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    times_s: dict[str, list[tuple[float, int]]] = {}
    for index in range(num_streams):
        prompt = [rng.randrange(10, vocab_size) for _ in range(PROMPT_TOKENS)]
        adapter = adapters[index % len(adapters)]
        engine.submit(GenerateRequest(str(index), prompt, sampling, adapter=adapter))
        times_s[str(index)] = []
    while engine.has_work:
        outputs = engine.step()
        now_s = time.perf_counter()
        for output in outputs:
            if output.error is not None:
                raise RuntimeError(f"{output.request_id}: {output.error.message}")
            times_s[output.request_id].append((now_s, len(output.token_ids)))
    begin_s = max(own[0][0] for own in times_s.values())
    end_s = min(own[-1][0] for own in times_s.values())
    tokens = sum(n for own in times_s.values() for at_s, n in own if begin_s < at_s <= end_s)
    return tokens / (end_s - begin_s)
