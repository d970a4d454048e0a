"""Gemma over fused kernels: how many launches a decode layer is."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="comes with torch for CUDA only")

from tests.fakes.tiny_models import GEMMA, tiny_config
from workers.layers.quantised import products
from workers.layers.sharding import ShardContext
from workers.models import cuda_gemma, cuda_stream
from workers.models.cuda_gemma import CudaGemmaForCausalLM
from workers.models.gemma_family import gemma_spec
from workers.models.token_inputs import TokenInputs
from workers.parallel.group import SingleRank

CPU = torch.device("cpu")
MAX_LAUNCHES = 9


class Launches(Counter):
    """Counts what would be launched; results are of the right shape."""

    def gemms(self, chooser, weights, kind):
        return [self._gemm(weight, kind) for weight in weights]

    def _gemm(self, weight, kind):
        num_columns = weight.shape[0] // 2 if kind == "gelu_tanh" else weight.shape[0]

        def multiply(x):
            self["gemm" if kind != "gelu_tanh" else "gated gemm"] += 1
            out = torch.zeros(len(x), num_columns)
            return out if kind == "gelu_tanh" else out.unsqueeze(0)

        return multiply

    def attention(self, is_fused):
        def rotate(qkv, places, new):
            self["rotation"] += 1
            return (qkv,)

        def attend(inputs, batch):
            self["attention"] += 1
            return torch.zeros(batch.num_tokens, 128)

        return SimpleNamespace(
            rotate=rotate,
            attend=attend,
            takes_projected=lambda batch: is_fused,
            attend_projected=attend,
        )

    def join(self, partials, residual, after, before):
        self["norms around an addition"] += 1
        assert {after.scale.dtype, before.scale.dtype} == {torch.float32}
        return residual.clone()


@pytest.mark.parametrize("is_fused", [True, False])
def test_a_decode_layer_is_few_launches(is_fused, monkeypatch) -> None:
    """Seven where attention takes the projection as it is, eight where it does not."""
    launches = Launches()
    shard = ShardContext(SingleRank(), torch.float32, CPU)
    model = CudaGemmaForCausalLM(gemma_spec(tiny_config(GEMMA["gemma3"])), 64, shard)
    fakes = {
        "GemmChooser": SimpleNamespace(for_device=lambda device: None),
        "partial_gemms": launches.gemms,
        "layer_attention": lambda *given: launches.attention(is_fused),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(cuda_stream, name, fake)
    monkeypatch.setattr(products, "partial_gemms", fakes["partial_gemms"])
    monkeypatch.setattr(products, "gated_gemms", launches.gemms)
    monkeypatch.setattr(cuda_gemma, "add_sandwich_norm_", launches.join)
    monkeypatch.setattr(cuda_gemma, "rms_norm", lambda x, scale, eps: x)
    model.prepare(None, None)
    tokens = torch.arange(3)
    batch = SimpleNamespace(num_tokens=3, locs_by_account=(tokens,))
    model(TokenInputs(tokens, tokens), batch)
    a_layer = {name: number / 3 for name, number in launches.items()}
    wanted = {"gemm": 3, "gated gemm": 1, "attention": 1, "norms around an addition": 2}
    assert a_layer == (wanted if is_fused else {**wanted, "rotation": 1})
    assert sum(a_layer.values()) <= MAX_LAUNCHES
