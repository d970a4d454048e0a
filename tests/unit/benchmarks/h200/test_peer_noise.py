"""What fills a peer's weights instead of its own noise."""

import torch
from torch import nn

from benchmarks.h200.peers.noise import fill_with_noise


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
