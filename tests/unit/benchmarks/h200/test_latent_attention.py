"""The steps of the benchmark of latent attention, small and on CPU."""

import pytest
import torch

from attention import LatentEntry
from benchmarks.h200.attention_steps import Work
from benchmarks.h200.latent_attention import Sizes, build

SIZES = Sizes(num_heads=2, nope_dim=8, v_head_dim=8, entry=LatentEntry(16, 8))


@pytest.mark.parametrize("work", [Work(3, 40, 1), Work(2, 16, 24), Work(1, 0, 30)])
def test_a_step_is_what_its_work_says(work, monkeypatch):
    monkeypatch.setattr("benchmarks.h200.latent_attention.MIN_POOL_BYTES", 1 << 12)
    monkeypatch.setattr("benchmarks.h200.latent_attention.MAX_CONTEXT_LEN", 64)
    step = build("torch_native", work, SIZES, 16, torch.device("cpu"), torch.float32)
    assert step.batch.num_tokens == work.rows * work.new
    assert step.batch.seq_lens_cpu.tolist() == work.seq_lens.tolist()
    with torch.inference_mode():
        out = step.layers[0](step.tokens, step.up, step.batch)
        step.run()
    assert out.shape == (work.rows * work.new, 16)
    assert out.isfinite().all()
