"""How long a short prompt waits for its tokens while others send texts of megabytes.

    python -m benchmarks.tokenizer_lanes [--seconds 20] [--long-bytes 4194304] [--long-callers 2]

One tokenizer pool with the built-in model's tokenizer, as an ingress has it; no HTTP and no engine.
Callers with long texts send the next when they have the last, and one caller asks for a text of two
tokens about fifty times a second. "one lane" is the same pool without a worker for short texts.
"""

import argparse
import asyncio
import time
from dataclasses import dataclass

from service.model_names import model_folder
from service.tokenizer.fair_queue import Flow
from service.tokenizer.jobs import EncodeText
from service.tokenizer.pool import MAX_SHORT_BYTES, TokenizerPool, TokenizerPoolConfig

SHORT = EncodeText("hello world")
LINE = "def encode(text, size): return [text[i : i + size] for i in range(0, len(text), size)]\n"
PERIOD_S = 0.02


@dataclass(frozen=True, slots=True)
class Setup:
    """One row of the table. max_short_bytes: -1 makes every text a long one."""

    name: str
    max_short_bytes: int
    num_long_callers: int


async def _send_long(pool: TokenizerPool, caller: str, text: str, took_s: list[float]) -> None:
    for number in range(1 << 30):
        started_s = time.perf_counter()
        await pool.encode_text(EncodeText(text), Flow(caller, str(number)))
        took_s.append(time.perf_counter() - started_s)


async def _send_short(pool: TokenizerPool, seconds: float) -> list[float]:
    waits_s: list[float] = []
    end_s = time.perf_counter() + seconds
    while time.perf_counter() < end_s:
        started_s = time.perf_counter()
        await pool.encode_text(SHORT, Flow("short", str(len(waits_s))))
        waits_s.append(time.perf_counter() - started_s)
        await asyncio.sleep(PERIOD_S)
    return waits_s


async def measure(setup: Setup, seconds: float, long_bytes: int) -> None:
    config = TokenizerPoolConfig(
        model_folder("builtin"), timeout_s=120.0, max_short_bytes=setup.max_short_bytes
    )
    pool = TokenizerPool(config)
    await pool.start()
    text = (LINE * (long_bytes // len(LINE) + 1))[:long_bytes]
    long_s: list[float] = []
    tasks = [
        asyncio.create_task(_send_long(pool, f"long-{i}", text, long_s))
        for i in range(setup.num_long_callers)
    ]
    await asyncio.sleep(PERIOD_S)
    waits_s = sorted(await _send_short(pool, seconds))
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await pool.aclose()
    slowest_s = f"{max(long_s):.2f}" if long_s else "-"
    cells = (f"{waits_s[int(share * (len(waits_s) - 1))] * 1e3:.1f}" for share in (0.5, 0.99, 1.0))
    print("|".join((setup.name, str(len(waits_s)), *cells, str(len(long_s)), slowest_s)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--long-bytes", type=int, default=4 << 20)
    parser.add_argument("--long-callers", type=int, default=2)
    arguments = parser.parse_args()
    print("setup|short texts|p50 ms|p99 ms|max ms|long texts|slowest long s")
    callers = arguments.long_callers
    for setup in (
        Setup("quiet", MAX_SHORT_BYTES, 0),
        Setup("one lane", -1, callers),
        Setup("two lanes", MAX_SHORT_BYTES, callers),
    ):
        asyncio.run(measure(setup, arguments.seconds, arguments.long_bytes))


if __name__ == "__main__":
    main()
