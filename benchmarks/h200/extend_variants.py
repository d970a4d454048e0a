"""Ways to attend prompts beside FlashAttention-3: what gluon_shape.TUNING is decided by.

    python -m benchmarks.h200.extend_variants [--variants gluon128 plain] [--heads 32,8,64]

Each variant is a process of its own, so that one that does not compile, faults or never ends costs
its own lines only. Error is beside fa3's output of the same step, relative.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from attention.backends.triton_paged import TritonBackend
from attention.kernels.extend_shape import ExtendGeometry
from attention.kernels.gluon_shape import GluonTuning
from attention.kernels.gpu_limits import GpuLimits
from attention.kernels.paged_extend import PagedExtend
from attention.kernels.warpgroup_extend import WarpgroupExtend
from benchmarks.h200.attention import FA3
from benchmarks.h200.attention_steps import (
    Heads,
    Setup,
    Step,
    Work,
    build_step,
    eager_seconds_per_layer,
)

REPEATS = 15
MAX_ERROR = 1e-2
CASES = (
    (Work(1, 0, 4096), 64),
    (Work(64, 0, 1024), 64),
    (Work(1, 0, 8192), 64),
    (Work(1, 32768, 1024), 64),
    (Work(8, 4096, 256), 64),
    (Work(4, 2000, 1000), 16),
)
"""Each with its page size."""


def _plain(geometry: ExtendGeometry, limits: GpuLimits) -> PagedExtend:
    return PagedExtend(geometry, limits)


def _gluon(tuning: GluonTuning) -> Callable[[ExtendGeometry, GpuLimits], PagedExtend]:
    return lambda geometry, limits: WarpgroupExtend(geometry, limits, tuning)


VARIANTS = {
    "gluon128": _gluon(GluonTuning(128, 2)),
    "gluon64": _gluon(GluonTuning(64, 4)),
    "plain": _plain,
}


def backend_of(variant: str) -> type[TritonBackend]:
    class VariantBackend(TritonBackend):
        def _make_extend(self) -> PagedExtend:
            return VARIANTS[variant](self._geometry(), self._limits)

    return VariantBackend


@torch.inference_mode()
def outputs(step: Step) -> torch.Tensor:
    layer = step.layers[0]
    return step.backend.forward(step.q, step.k, step.v, layer, step.batch, save_kv_cache=False)


def beside_fa3(variant: str, heads: Heads, work: Work, page_size: int) -> dict[str, object]:
    """Seconds of both over the same pools, and the largest and the relative difference."""
    theirs = build_step(Setup(FA3, heads, page_size), work)
    pools = (theirs.backend.req_to_token_pool, theirs.backend.token_to_kv_pool)
    backend = backend_of(variant)(theirs.backend.config, *pools)
    batch = replace(theirs.batch, attn_backend=backend)
    backend.init_forward_metadata(batch)
    ours = replace(theirs, backend=backend, batch=batch)
    expected, actual = outputs(theirs).float(), outputs(ours).float()
    difference = actual - expected.view_as(actual)
    return {
        "work": f"{work}, pages of {page_size}",
        "error": float(difference.norm() / expected.norm()),
        "max_error": float(difference.abs().max()),
        "fa3_us": eager_seconds_per_layer(theirs, REPEATS) * 1e6,
        "us": eager_seconds_per_layer(ours, REPEATS) * 1e6,
    }


def measure(variant: str, heads: Heads) -> None:
    """A line of JSON for each case."""
    for work, page_size in CASES:
        torch.manual_seed(0)
        print(json.dumps(beside_fa3(variant, heads, work, page_size)), flush=True)
        torch.cuda.empty_cache()


def report(variant: str, line: str) -> None:
    found = json.loads(line)
    verdict = "right" if found["error"] < MAX_ERROR else "WRONG"
    print(
        f"{variant:10} {found['work']:32} {found['us']:8.1f} us, fa3 {found['fa3_us']:8.1f} us, "
        f"{found['fa3_us'] / found['us']:.3f} of it; {verdict}: error {found['error']:.1e}, "
        f"at most {found['max_error']:.1e}",
        flush=True,
    )


def measure_apart(variant: str, heads: str, limit_s: float) -> None:
    """In a process of its own that ends after limit_s at the latest."""
    command = [sys.executable, "-m", "benchmarks.h200.extend_variants", "--measure", variant]
    command += ["--heads", heads]
    begin = time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
        out, why = done.stdout, done.stderr.strip().splitlines()[-3:] if done.returncode else []
    except subprocess.TimeoutExpired as error:
        out = error.stdout.decode() if error.stdout else ""
        why = [f"did not end within {limit_s:.0f} s"]
    for line in out.splitlines():
        report(variant, line)
    for line in why:
        print(f"{variant:10} FAILED: {line}", flush=True)
    print(f"{variant:10} took {time.monotonic() - begin:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--limit-s", type=float, default=60.0, help="of each variant")
    parser.add_argument("--measure", choices=list(VARIANTS), help="this one, in this process")
    parser.add_argument("--heads", default="32,8,128", help="query heads, KV heads, elements")
    arguments = parser.parse_args()
    if arguments.measure:
        measure(arguments.measure, Heads(*map(int, arguments.heads.split(","))))
        return
    print(f"{torch.cuda.get_device_name()}, heads {arguments.heads}", flush=True)
    for variant in arguments.variants:
        measure_apart(variant, arguments.heads, arguments.limit_s)


if __name__ == "__main__":
    main()
