"""Bytes a second of latent attention's kernel within the engine's own decode steps.

    python3 -m benchmarks.h200.latent_step benchmarks/h200/models/deepseek-v2-lite.json

Streams of equal prompts decode; torch's profiler sees the kernels of some steps, replayed from
their graphs. Bytes of a layer: every stream's prompt, latent and rotated part, read once; the
tokens that a stream has made by then are left out. "alone" is by the attention kernel's own
duration, "with its company" by how much later everything of that attention ended: its plan, the
merge of split rows, and the wait before them.
"""

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from typing import NamedTuple

from benchmarks.h200.step_profile import (
    NUM_STEPS,
    advances_us,
    profile_calls,
    report,
    start_streams,
)

KERNELS = {"flashmla": ("mla",), "fa3": ("flashattnfwd", "flash::")}
"""What the names of a backend's kernels have, in small letters."""

Kernel = tuple[str, float, float]
"""(name, start in us, duration in us)."""


class Share(NamedTuple):
    """name: of the kernel that takes most of a backend's time. num_calls: in all steps. alone_us: a
    call's duration; company_us: by which the whole attention moved the end of the work, a call."""

    name: str
    num_calls: int
    alone_us: float
    company_us: float


def share_of(kernels: list[Kernel], marks: tuple[str, ...]) -> Share:
    """Raises ValueError where no kernel's name has a mark."""
    own = [one for one in kernels if any(mark in one[0].lower() for mark in marks)]
    if not own:
        raise ValueError(f"no kernel is called {' or '.join(marks)}")
    times: dict[str, list[float]] = {}
    for name, _, duration in own:
        times.setdefault(name, []).append(duration)
    name, durations = max(times.items(), key=lambda item: sum(item[1]))
    advances = sum(us for other, us in advances_us(kernels) if other in times)
    calls = len(durations)
    return Share(name, calls, sum(durations) / calls, advances / calls)


def main() -> None:
    from workers.config import EngineConfig
    from workers.parallel.local_engine import build_local_engine

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("config", type=Path, help="of a model that keeps latents")
    parser.add_argument("--backend", choices=KERNELS, default="flashmla")
    parser.add_argument("--streams", type=int, default=128)
    parser.add_argument("--prompt-tokens", type=int, default=4096)
    arguments = parser.parse_args()
    facts = json.loads(arguments.config.read_text())
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(arguments.config, Path(folder) / "config.json")
        config = EngineConfig(
            model=folder,
            load_format="dummy",
            max_context_len=8192,
            max_running_requests=arguments.streams,
            attention_backend=arguments.backend,
            enable_prefix_cache=False,
        )
        engine = build_local_engine(config, lambda done, total: None)
    while engine.prepare_while_idle():
        pass
    start_streams(engine, arguments.streams, arguments.prompt_tokens)
    kernels = profile_calls(engine.step, NUM_STEPS)
    engine.close()
    report(f"{arguments.streams} streams", NUM_STEPS, kernels)
    share = share_of(kernels, KERNELS[arguments.backend])
    elements = facts["kv_lora_rank"] + facts["qk_rope_head_dim"]
    num_bytes = arguments.streams * arguments.prompt_tokens * elements * 2
    print(
        json.dumps(
            {
                "backend": arguments.backend,
                "kernel": share.name[:120],
                "calls_a_step": share.num_calls / NUM_STEPS,
                "megabytes_a_layer": round(num_bytes / 1e6, 1),
                "alone_us": round(share.alone_us, 2),
                "alone_tb_per_s": round(num_bytes / share.alone_us / 1e6, 3),
                "with_its_company_us": round(share.company_us, 2),
                "with_its_company_tb_per_s": round(num_bytes / share.company_us / 1e6, 3),
            }
        )
    )


if __name__ == "__main__":
    main()
