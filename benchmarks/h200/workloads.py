"""The offline workloads of the performance table, the same for every engine that can run them.

Token ids in, greedy, end of sequence ignored. Decode time a token is a difference: the time for one
token is taken off the time for many, so that prompt processing cancels out. Knows no engine.
"""

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

Generate = Callable[[list[list[int]], int], list[int]]
"""(prompts, tokens for each) -> how many tokens each prompt got."""

LOWEST_TOKEN_ID = 10
NUM_DECODED = 256


@dataclass(frozen=True, slots=True)
class Decode:
    """Streams of equal prompts: milliseconds a decode step, and prompt tokens a second before."""

    num_streams: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Batch:
    """Requests submitted at once: seconds until the last has ended."""

    name: str
    num_requests: int
    prompt_tokens: int
    max_tokens: int


WARM_UPS = (Batch("", 32, 128, 32), Batch("", 1, 1024, 32), Batch("", 64, 1024, 32))
DECODES = (Decode(1, 1024), Decode(64, 1024), Decode(256, 128))
BATCHES = (Batch("512x1024_256_s", 512, 1024, 256), Batch("16x7000_64_s", 16, 7000, 64))


class WorkloadRunner:
    """Fresh random prompts for every batch; their seed is fixed."""

    def __init__(self, generate: Generate, vocab_size: int) -> None:
        self._generate = generate
        self._vocab_size = vocab_size
        self._rng = random.Random(0)

    def warm_up(self) -> None:
        for batch in WARM_UPS:
            self.seconds(batch.num_requests, batch.prompt_tokens, batch.max_tokens)

    def rows(self, with_batches: bool) -> Iterator[tuple[str, float]]:
        """(name, value) of every measurement, as they are done."""
        for decode in DECODES:
            yield from self._decode_rows(decode)
        for batch in BATCHES if with_batches else ():
            seconds = self.seconds(batch.num_requests, batch.prompt_tokens, batch.max_tokens)
            yield batch.name, round(seconds, 3)

    def seconds(self, num_requests: int, prompt_tokens: int, max_tokens: int) -> float:
        """Raises RuntimeError if a request got another number of tokens than it should."""
        prompts = [
            [self._rng.randrange(LOWEST_TOKEN_ID, self._vocab_size) for _ in range(prompt_tokens)]
            for _ in range(num_requests)
        ]
        start_s = time.perf_counter()
        counts = self._generate(prompts, max_tokens)
        elapsed_s = time.perf_counter() - start_s
        if counts != [max_tokens] * num_requests:
            raise RuntimeError(f"{max_tokens} tokens each were asked for, got {counts[:4]} ...")
        return elapsed_s

    def _decode_rows(self, decode: Decode) -> Iterator[tuple[str, float]]:
        first_s = self.seconds(decode.num_streams, decode.prompt_tokens, 1)
        whole_s = self.seconds(decode.num_streams, decode.prompt_tokens, 1 + NUM_DECODED)
        step_ms = (whole_s - first_s) / NUM_DECODED * 1e3
        yield f"decode_{decode.num_streams}_ms", round(step_ms, 3)
        num_prompt_tokens = decode.num_streams * decode.prompt_tokens
        yield (
            f"prefill_{decode.num_streams}x{decode.prompt_tokens}_tps",
            round(num_prompt_tokens / first_s),
        )
