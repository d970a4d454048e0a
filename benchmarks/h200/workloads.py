"""The offline workloads of the performance tables, the same for every engine that can run them.

Token ids in, greedy, end of sequence ignored. Decode time a token is a difference: the time for one
token is taken off the time for many, so that prompt processing cancels out. Knows no engine.
"""

import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

Generate = Callable[[list[list[int]], list[int]], list[int]]
"""(prompts, how many tokens each is to get) -> how many each got."""

LOWEST_TOKEN_ID = 10
# Below the vocabulary of every model in models/.
VOCAB_SIZE = 100_000
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


@dataclass(frozen=True, slots=True)
class FirstToken:
    """One prompt at a time, nothing else to do: milliseconds to its token, the median of some."""

    prompt_tokens: int
    num_prompts: int = 7


@dataclass(frozen=True, slots=True)
class Chat:
    """Requests submitted at once, more than may run: seconds until the last has ended.

    Prompts and outputs are short and of all lengths (both bounds included), so that requests come
    and go step by step: nearly every step computes some prompt beside many decoding rows.
    """

    num_requests: int
    prompt_tokens: tuple[int, int]
    max_tokens: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Prefill:
    """Requests submitted at once, of one output token each: prompt tokens a second, the median of
    some. For what lasts too little to compare two trees by a single measurement."""

    num_requests: int
    prompt_tokens: int
    num_times: int = 9


@dataclass(frozen=True, slots=True)
class FullLoad:
    """Requests submitted at once: output tokens a second, of all together, until the last has
    ended. As many as may run are one wave: all prompts, then steps of as many rows to the end. More
    waves would add the same again, and their time."""

    num_requests: int
    prompt_tokens: int
    max_tokens: int


Workload = Decode | Batch | SharedPrefix | FirstToken | Chat | Prefill | FullLoad

WARM_UPS: tuple[Workload, ...] = (
    Batch("warm_up", 32, 128, 32),
    Batch("warm_up", 1, 1024, 32),
    Batch("warm_up", 64, 1024, 32),
)
DECODES = (Decode(1, 1024), Decode(64, 1024), Decode(256, 128))
PREFILLS = (Prefill(1, 1024, num_times=25), Prefill(64, 1024), Prefill(256, 128, num_times=15))
LONG = Batch("16x7000_64_s", 16, 7000, 64)
THROUGHPUT = Batch("512x1024_256_s", 512, 1024, 256)
HALF_THROUGHPUT = Batch("256x1024_256_s", 256, 1024, 256)
FULL_LOAD = FullLoad(256, 1024, 1024)
WORKLOADS: dict[str, tuple[Workload, ...]] = {
    "full": (*DECODES, THROUGHPUT, LONG),
    "reduced": (*DECODES, HALF_THROUGHPUT, LONG),
    "brief": (*DECODES[:2], HALF_THROUGHPUT),
    "brief_512": (*DECODES[:2], THROUGHPUT),
    "decode": DECODES,
    "full_load": (FULL_LOAD,),
    "decode_and_load": (*DECODES, FULL_LOAD),
    "turns": (*DECODES, *PREFILLS, THROUGHPUT, LONG),
    "batches": (THROUGHPUT, LONG),
    "chat": (
        *(FirstToken(length) for length in (32, 128, 256, 512, 1024)),
        Chat(1024, (32, 512), (32, 384)),
    ),
    "prefix": (SharedPrefix(256, 4096, 128, 64),),
    "smoke": (
        Decode(2, 64),
        Batch("8x64_8_s", 8, 64, 8),
        SharedPrefix(8, 64, 16, 8),
        FirstToken(16),
        Chat(8, (8, 32), (2, 9)),
        Prefill(2, 16, num_times=3),
        FullLoad(4, 16, 8),
    ),
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
            case FirstToken():
                yield self._first_token_row(workload)
            case Chat():
                yield self._chat_row(workload)
            case Prefill():
                yield self._prefill_row(workload)
            case FullLoad():
                yield self._full_load_row(workload)

    def _prompts(
        self, num_requests: int, own_tokens: int, prefix: list[int] | None = None
    ) -> list[list[int]]:
        return [[*(prefix or ()), *self._tokens(own_tokens)] for _ in range(num_requests)]

    def _tokens(self, number: int) -> list[int]:
        return [self._rng.randrange(LOWEST_TOKEN_ID, self._vocab_size) for _ in range(number)]

    def _seconds(self, prompts: list[list[int]], max_tokens: int | list[int]) -> float:
        """max_tokens: of all prompts, or of each."""
        wanted = [max_tokens] * len(prompts) if isinstance(max_tokens, int) else max_tokens
        start_s = time.perf_counter()
        counts = self._generate(prompts, wanted)
        elapsed_s = time.perf_counter() - start_s
        if counts != wanted:
            raise RuntimeError(f"{wanted[:4]} ... tokens were asked for, got {counts[:4]} ...")
        return elapsed_s

    def _first_token_row(self, first: FirstToken) -> tuple[str, float]:
        seconds = [
            self._seconds(self._prompts(1, first.prompt_tokens), 1)
            for _ in range(first.num_prompts)
        ]
        name = f"first_token_{first.prompt_tokens}_ms"
        return name, round(statistics.median(seconds) * 1e3, 2)

    def _prefill_row(self, prefill: Prefill) -> tuple[str, float]:
        requests, length = prefill.num_requests, prefill.prompt_tokens
        seconds = [
            self._seconds(self._prompts(requests, length), 1) for _ in range(prefill.num_times)
        ]
        name = f"prefill_{requests}x{length}_median_tps"
        return name, round(requests * length / statistics.median(seconds))

    def _full_load_row(self, load: FullLoad) -> tuple[str, float]:
        requests, length, outputs = load.num_requests, load.prompt_tokens, load.max_tokens
        elapsed_s = self._seconds(self._prompts(requests, length), outputs)
        return f"output_{requests}x{length}_{outputs}_tps", round(requests * outputs / elapsed_s)

    def _chat_row(self, chat: Chat) -> tuple[str, float]:
        lengths = [self._rng.randint(*chat.prompt_tokens) for _ in range(chat.num_requests)]
        max_tokens = [self._rng.randint(*chat.max_tokens) for _ in range(chat.num_requests)]
        prompts = [self._tokens(length) for length in lengths]
        return f"chat_{chat.num_requests}_s", round(self._seconds(prompts, max_tokens), 3)

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
