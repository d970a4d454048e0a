"""Products of a mixture of experts alone on one H200: tiles by number of tokens, against memory.

    python3 -m benchmarks.h200.experts [CONFIG_JSON] [--tokens 1 16 64] [--sweep]

DeepSeek-V2-Lite's sizes, or those of a config whose tokens choose by softmax. Without --sweep the
layer as the model calls it, routing included; with it both products for every candidate, the three
fastest of each. TB/s: of the weights that are read.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path

import torch
import triton
from transformers import AutoConfig

from benchmarks.h200.attention_steps import graphed_seconds
from workers.layers.cuda.expert_gemm import ExpertTiles
from workers.layers.cuda.expert_routing import choose_by_softmax, group
from workers.layers.cuda.experts import GroupedMixture
from workers.layers.moe.experts import Experts
from workers.layers.moe.mixture import MixtureOfExperts
from workers.layers.moe.routing import SoftmaxRouting
from workers.layers.moe.spec import MixtureSpec
from workers.layers.sharding import ShardContext
from workers.models.deepseek_family import deepseek_spec
from workers.models.llama_family import llama_family_spec
from workers.parallel.group import SingleRank

CONFIGS = Path(__file__).parent / "models"
NUM_TOKENS = (1, 4, 16, 64, 256, 1024, 8192)
REPEATS = 20
KEPT = 3


def mixture_of(path: Path, device: torch.device) -> MixtureOfExperts:
    """With random weights, of a config in Hugging Face's layout."""
    config = AutoConfig.for_model(**json.loads(path.read_text()))
    is_latent = hasattr(config, "kv_lora_rank")
    spec = deepseek_spec(config) if is_latent else llama_family_spec(config)
    if spec.mixture is None:
        raise SystemExit(f"{path} has no mixture of experts")
    shard = ShardContext(SingleRank(), torch.bfloat16, device)
    mixture = MixtureOfExperts(spec.mixture, spec.hidden_size, shard)
    for parameter in mixture.parameters():
        parameter.data.normal_(std=0.02)
    return mixture


def candidates(num_tokens: int, spec: MixtureSpec) -> list[ExpertTiles]:
    """What may be worth a try for so many tokens."""
    rows = num_tokens * spec.routing.num_chosen // spec.num_experts
    if rows <= 16:
        shapes = product((16,), (32, 64), (128, 256), (3, 5), (4,))
    elif rows <= 64:
        shapes = product((32, 64), (64, 128), (64, 128), (4,), (4,))
    else:
        shapes = product((64, 128), (128, 256), (64,), (3, 4), (8,))
    return [ExpertTiles(*shape) for shape in shapes]


def seconds(run: Callable[[], object]) -> float:
    """Of one call; infinite where the GPU has too little shared memory for it."""
    try:
        return graphed_seconds(run, REPEATS)
    except triton.runtime.errors.OutOfResources:
        return float("inf")


def sweep(layer: Experts, x: torch.Tensor) -> None:
    spec, routing = layer.spec, layer.spec.routing
    if not isinstance(routing, SoftmaxRouting):
        raise SystemExit(f"{type(routing).__name__} has no kernel of its own")
    logits = torch.randn(x.shape[0], spec.num_experts, device=x.device)
    chosen = choose_by_softmax(logits, routing.num_chosen, spec.num_pieces, routing.factor)
    num_read = int((chosen.counts > 0).sum())
    width = spec.num_choices
    found: dict[str, list[tuple[float, ExpertTiles]]] = {"activate": [], "project": []}
    for tiles in candidates(x.shape[0], spec):
        grouped = group(chosen, tiles.block_rows)
        activated = torch.empty(
            (x.shape[0] * width, spec.width), dtype=x.dtype, device=x.device
        ).normal_()

        weights = layer.weights
        activate = partial(
            tiles.activate,
            *(x, weights.gate_up, grouped, width, weights.gate_up_bias, weights.gating),
        )
        project = partial(
            tiles.project,
            *(activated, weights.down, chosen.weights, grouped, weights.down_bias),
        )
        found["activate"].append((seconds(activate), tiles))
        found["project"].append((seconds(project), tiles))
    for name, weight in (("activate", layer.gate_up), ("project", layer.down)):
        num_bytes = num_read * weight[0].numel() * weight.itemsize
        for one, tiles in sorted(found[name], key=lambda pair: pair[0])[:KEPT]:
            rate = num_bytes / one / 1e12
            print(f"{x.shape[0]:5} {name:8} {one * 1e6:8.1f} us {rate:5.2f} TB/s {tiles}")


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("config", nargs="?", type=Path, default=CONFIGS / "deepseek-v2-lite.json")
    parser.add_argument("--tokens", nargs="+", type=int, default=list(NUM_TOKENS))
    parser.add_argument("--sweep", action="store_true")
    arguments = parser.parse_args()
    device = torch.device("cuda")
    mixture = mixture_of(arguments.config, device)
    hidden_size = mixture.router.weight.shape[1]
    layer = GroupedMixture(mixture, is_summed=False)
    for num_tokens in arguments.tokens:
        x = torch.randn((num_tokens, hidden_size), dtype=torch.bfloat16, device=device)
        if arguments.sweep:
            sweep(mixture.experts, x)
        else:
            one = seconds(partial(layer, x))
            print(f"{num_tokens:5} layer {one * 1e6:8.1f} us", flush=True)


if __name__ == "__main__":
    main()
