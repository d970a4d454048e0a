"""What fills a peer's weights instead of its own noise."""

import torch
from torch import nn

from benchmarks.h200.peers.noise import fill_with_noise
from workers.layers.formats.fills import INT4_SCALE


def test_matrices_are_noise_biases_zeros_and_norms_ones() -> None:
    model = nn.Sequential(nn.Embedding(300, 64), nn.Linear(64, 96), nn.RMSNorm(96))
    model.register_buffer("counts", torch.arange(3))
    fill_with_noise(model, object())
    for matrix in (model[0].weight, model[1].weight):
        assert 0.018 < matrix.std().item() < 0.022
        assert abs(matrix.mean().item()) < 0.002
    assert not model[1].bias.any()
    assert (model[2].weight == 1.0).all()
    assert model.counts.tolist() == [0, 1, 2]


def test_quantised_matrices_stand_for_noise() -> None:
    model = nn.Module()
    tensors = {
        "weight": torch.empty(200, 128, dtype=torch.float8_e4m3fn),
        "weight_scale": torch.empty(200, 1),
        "qweight": torch.zeros(16, 200, dtype=torch.int32),
        "qzeros": torch.empty(1, 25, dtype=torch.int32),
        "scales": torch.empty(1, 200, dtype=torch.float16),
        "w13_weight_scale": torch.empty(4, 8, dtype=torch.uint8),
    }
    for name, tensor in tensors.items():
        model.register_buffer(name, tensor)
    fill_with_noise(model)
    fp8 = model.weight.float() * model.weight_scale
    assert 0.018 < fp8.std().item() < 0.022
    shifts = torch.arange(0, 32, 4)[:, None, None]
    values = ((model.qweight >> shifts & 15) - 8) * model.scales.float()
    assert 0.018 < values.std().item() < 0.022
    ours = torch.empty_like(model.scales)
    INT4_SCALE(ours, torch.Generator())
    assert torch.equal(model.scales, ours)
    assert (model.qzeros >> shifts & 15).eq(7).all()
    assert (model.w13_weight_scale == 120).all()
