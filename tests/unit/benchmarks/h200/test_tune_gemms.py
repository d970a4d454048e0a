"""What the GEMM tuner writes for a GPU whose time ran out."""

import pytest

pytest.importorskip("triton", reason="comes with torch for CUDA only")

from benchmarks.h200.tune_gemms import shapes_of, whole
from workers.layers.gemm.configs import TOKEN_BUCKETS

LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}


def test_only_whole_shapes_are_written(caplog) -> None:
    done = dict.fromkeys(TOKEN_BUCKETS)
    assert whole({"a": done, "b": {1: None}}) == {"a": done}
    assert "left out, for want of time: b" in caplog.text


def test_a_model_has_five_shapes() -> None:
    assert [str(shape) for shape in shapes_of(LLAMA_8B, 1)] == [
        "6144x4096 split",
        "4096x4096 split",
        "28672x4096 gated",
        "4096x14336 split",
        "128256x4096 whole",
    ]
    assert [shape.role for shape in shapes_of(LLAMA_8B, 2)] == [
        "split",
        "whole",
        "gated",
        "whole",
        "whole",
    ]
