"""What a process made when it started, and keeps."""

import gc


def settle() -> None:
    """Leave what lives now out of the garbage collector's work; call it when a start has ended, in
    a process that is this product's alone.

    Modules, schemas and routes of an ingress are so many objects that full collections hold its
    loop, again and again where clients open many connections: p99 to the first token under such
    traffic was 92 ms with them, 26 to 33 ms without (benchmarks.attacks, `watches`). An engine's
    process has 440,000 objects when it has loaded, for which a full collection holds every stream
    240 ms; 0.2 ms without them (the built-in model on a busy CPU core).
    """
    gc.collect()
    gc.freeze()
