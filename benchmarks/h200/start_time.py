"""Where the time from process to ready goes: imports, weights, pools and kernels, first step.

    python3 -m benchmarks.h200.start_time benchmarks/h200/models/llama-3.1-8b.json

Dummy weights of the config's shapes. "python and torch" begins with the process itself.
"""

import time

_FIRST_LINE_S = time.time()

import argparse  # noqa: E402  the clock starts before the imports that it measures
import os  # noqa: E402
import shutil  # noqa: E402
import tempfile  # noqa: E402
from pathlib import Path  # noqa: E402


def process_start_s() -> float:
    """time.time() of this process's start, to a clock tick of the kernel."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    since_boot_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    uptime_s = float(Path("/proc/uptime").read_text().split()[0])
    return time.time() - uptime_s + since_boot_s


class Laps:
    """Names the time since the last lap."""

    def __init__(self, start_s: float) -> None:
        self._start_s = self._last_s = start_s

    def end(self, name: str, at_s: float | None = None) -> None:
        now_s = time.time() if at_s is None else at_s
        print(f"{name:<32}{now_s - self._last_s:7.2f} s")
        self._last_s = now_s

    def total(self) -> None:
        print(f"{'process to ready':<32}{self._last_s - self._start_s:7.2f} s")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="where the start's time goes")
    parser.add_argument("config", type=Path, help="config.json of the model")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--max-context-len", type=int, default=8192)
    return parser.parse_args()


def main() -> None:
    laps = Laps(process_start_s())
    laps.end("interpreter", _FIRST_LINE_S)
    arguments = parse_arguments()
    import torch

    laps.end("import torch")
    from workers.config import EngineConfig
    from workers.engine.engine import Engine

    laps.end("import the engine")
    is_cuda = torch.cuda.is_available()
    if is_cuda:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        torch.empty(1, device="cuda")
    laps.end("CUDA context")
    seen: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(arguments.config, Path(folder) / "config.json")
        config = EngineConfig(
            model=folder,
            load_format="dummy",
            dtype="bfloat16",
            kv_cache_dtype=arguments.kv_cache_dtype,
            max_context_len=arguments.max_context_len,
        )
        engine = Engine.from_config(config, on_progress=lambda done, all: seen.append(time.time()))
    laps.end("read the config, build the model", seen[0])
    laps.end("fill the weights", seen[-1])
    laps.end("pools, backend, GEMM choice")
    engine.warm_up()
    laps.end("first request")
    laps.total()
    if is_cuda:
        peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved()
        print(f"allocated at most {peak / 1e9:.1f} GB, reserved now {reserved / 1e9:.1f} GB")
    print(f"{engine.info.num_pages} pages of {engine.info.page_size}")
    engine.close()


if __name__ == "__main__":
    main()
