"""Ranks that are threads, over kernels that Triton's interpreter runs."""

import threading

from triton.runtime.interpreter import GridExecutor


def run_one_kernel_at_a_time():
    """The interpreter changes Triton's own functions while a kernel runs. To be called with
    TRITON_INTERPRET=1."""
    lock, run = threading.Lock(), GridExecutor.__call__

    def run_alone(self, *arguments, **options):
        with lock:
            return run(self, *arguments, **options)

    GridExecutor.__call__ = run_alone
