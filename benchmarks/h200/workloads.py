"""The offline workloads of the performance tables, the same for every engine that can run them.

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
# Below the vocabulary of every model in models/.
VOCAB_SIZE = 120_000
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


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Requests with one prefix in common, submitted at once, twice: seconds before and after an
    engine has seen the prefix. Tokens behind the prefix are new each time."""

    num_requests: int
    prefix_tokens: int
    own_tokens: int
    max_tokens: int


Workload = Decode | Batch | SharedPrefix

WARM_UPS: tuple[Workload, ...] = (
    Batch("warm_up", 32, 128, 32),
    Batch("warm_up", 1, 1024, 32),
    Batch("warm_up", 64, 1024, 32),
)
DECODES = (Decode(1, 1024), Decode(64, 1024), Decode(256, 128))
LONG = Batch("16x7000_64_s", 16, 7000, 64)
THROUGHPUT = Batch("512x1024_256_s", 512, 1024, 256)
WORKLOADS: dict[str, tuple[Workload, ...]] = {
    "full": (*DECODES, THROUGHPUT, LONG),
    "reduced": (*DECODES, Batch("256x1024_256_s", 256, 1024, 256), LONG),
    "decode": DECODES,
    "batches": (THROUGHPUT, LONG),
    "prefix": (SharedPrefix(256, 4096, 128, 64),),
    "smoke": (Decode(2, 64), Batch("8x64_8_s", 8, 64, 8), SharedPrefix(8, 64, 16, 8)),
}
"""By name. "prefix" is for engines with their prefix cache on, the others for engines without."""

PREFIX_CACHED = frozenset({"prefix"})


class WorkloadRunner:
    """Fresh random prompts for every batch; their seed is fixed."""

    def __init__(self, generate: Generate, vocab_size: int) -> None:
        self._generate = generate
        self._vocab_size = vocab_size
        self._rng = random.Random(0)

    def warm_up(self, workloads: tuple[Workload, ...]) -> None:
        """The same short batches for every engine, and one round of what shares a prefix."""
        for workload in (*WARM_UPS, *workloads):
            if isinstance(workload, SharedPrefix) or workload in WARM_UPS:
                for _ in self.rows(workload):
                    pass

    def rows(self, workload: Workload) -> Iterator[tuple[str, float]]:
        """(name, value) of every measurement of a workload, as they are done.

        Raises RuntimeError if a request got another number of tokens than it should.
        """
        match workload:
            case Decode():
                yield from self._decode_rows(workload)
            case Batch():
                prompts = self._prompts(workload.num_requests, workload.prompt_tokens)
                yield workload.name, round(self._seconds(prompts, workload.max_tokens), 3)
            case SharedPrefix():
                yield from self._prefix_rows(workload)

    def _prompts(
        self, num_requests: int, own_tokens: int, prefix: list[int] | None = None
    ) -> list[list[int]]:
        return [[*(prefix or ()), *self._tokens(own_tokens)] for _ in range(num_requests)]

    def _tokens(self, number: int) -> list[int]:
        return [self._rng.randrange(LOWEST_TOKEN_ID, self._vocab_size) for _ in range(number)]

    def _seconds(self, prompts: list[list[int]], max_tokens: int) -> float:
        start_s = time.perf_counter()
        counts = self._generate(prompts, max_tokens)
        elapsed_s = time.perf_counter() - start_s
        if counts != [max_tokens] * len(prompts):
            raise RuntimeError(f"{max_tokens} tokens each were asked for, got {counts[:4]} ...")
        return elapsed_s

    def _decode_rows(self, decode: Decode) -> Iterator[tuple[str, float]]:
        streams, prompt_tokens = decode.num_streams, decode.prompt_tokens
        first_s = self._seconds(self._prompts(streams, prompt_tokens), 1)
        whole_s = self._seconds(self._prompts(streams, prompt_tokens), 1 + NUM_DECODED)
        yield f"decode_{streams}_ms", round((whole_s - first_s) / NUM_DECODED * 1e3, 3)
        name = f"prefill_{streams}x{prompt_tokens}_tps"
        yield name, round(streams * prompt_tokens / first_s)

    def _prefix_rows(self, shared: SharedPrefix) -> Iterator[tuple[str, float]]:
        prefix = self._tokens(shared.prefix_tokens)
        for state in ("cold", "warm"):
            prompts = self._prompts(shared.num_requests, shared.own_tokens, prefix)
            name = f"prefix_{shared.num_requests}x{shared.prefix_tokens}_{state}_s"
            yield name, round(self._seconds(prompts, shared.max_tokens), 3)
