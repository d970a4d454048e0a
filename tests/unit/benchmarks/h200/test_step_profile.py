"""What a profile says of kernels that overlap."""

from benchmarks.h200.step_profile import advances_us, places_us


def test_a_kernel_takes_what_it_moves_the_end_by() -> None:
    """Kernels that began early, and one that ends before another that began first."""
    kernels = [("a", 0.0, 4.0), ("c", 1.0, 9.0), ("b", 3.0, 4.0), ("d", 2.0, 5.0)]
    assert advances_us(kernels) == [("a", 4.0), ("b", 3.0), ("d", 0.0), ("c", 3.0)]


def test_layers_are_laid_over_each_other() -> None:
    """The last one of a step, which the head and the next step's beginning follow, is left out."""
    step = [("begin", 9.0)]
    for further in (0.0, 1.0, 5.0):
        step += [("attend_chunk", 2.0 + further), ("o", 1.0), ("qkv", 3.0 + further)]
    step += [("head", 50.0)]
    assert places_us(step + step) == [("attend_chunk", 2.5), ("o", 1.0), ("qkv", 3.5)]


def test_there_may_be_no_layer() -> None:
    assert places_us([("gemm", 1.0), ("attend", 1.0)]) == []
