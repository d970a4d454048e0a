"""Run the tests that need GPUs: `python3 -m tests.gpu`, or `--gpus 2` for tensor parallelism.

One GPU: everything but tests/gpu/parallel, in as many processes as the GPU's memory and the cores
allow. Several: tests/gpu/parallel; ranks have their GPUs for themselves, one process more than
there are pairs of GPUs starts the next engine meanwhile. Whatever else is given goes to pytest:
`python3 -m tests.gpu -k gemm`. With `--proofs-to FOLDER` what the run proved of attention backends
and models is written there, for tests/gpu/attention/results. The last lines count what was skipped,
by reason, and what passed.
"""

import argparse
import importlib.util
import os
import sys
from pathlib import Path

import torch

from tests.gpu.parallel.gpu_locks import visible_gpus
from tests.gpu.shares import shares_of

ROOT = Path(__file__).parents[2]
GPU_COUNTS = (1, 2, 4)


def alone_options(num_processes):
    """pytest's for one GPU."""
    free_bytes, total_bytes = torch.cuda.mem_get_info(0)
    shares = shares_of(free_bytes, total_bytes, len(os.sched_getaffinity(0)), num_processes)
    print(f"{shares.num_processes} processes, {shares.memory_share:.3f} of the memory each")
    return [
        "tests/gpu",
        "--ignore=tests/gpu/parallel",
        f"--numprocesses={shares.num_processes}",
        "--dist=worksteal",
        f"--gpu-memory-share={shares.memory_share:.4f}",
    ]


def parallel_options(num_gpus, num_processes):
    """pytest's for several GPUs: a module, whose tests share engines, stays in one process."""
    processes = num_gpus // 2 + 1 if num_processes is None else num_processes
    return ["tests/gpu/parallel", f"--numprocesses={processes}", "--dist=loadfile"]


def main():
    parser = argparse.ArgumentParser(
        prog="python3 -m tests.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--gpus", type=int, choices=GPU_COUNTS, default=1)
    parser.add_argument("--processes", type=int, help="instead of what memory and cores allow")
    arguments, rest = parser.parse_known_args()
    if importlib.util.find_spec("xdist") is None:
        parser.error("pytest-xdist is not installed: pip install pytest-xdist")
    if torch.cuda.device_count() < arguments.gpus:
        parser.error(f"needs {arguments.gpus} NVIDIA GPUs, torch sees {torch.cuda.device_count()}")
    if arguments.gpus == 1:
        options = alone_options(arguments.processes)
    else:
        options = parallel_options(arguments.gpus, arguments.processes)
    # Other plugins that a GPU host may have warn beside pytest-xdist.
    options += ["-p", "no:cacheprovider", "-p", "no:benchmark", "-q", "-m", "gpu", "--durations=15"]
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": ",".join(visible_gpus()[: arguments.gpus]),
        "PYTEST_PLUGINS": "tests.gpu.plugin,tests.proofs.plugin",
    }
    os.chdir(ROOT)
    # This process's own use of the GPU ends here.
    os.execve(sys.executable, [sys.executable, "-m", "pytest", *options, *rest], environment)


if __name__ == "__main__":
    main()
