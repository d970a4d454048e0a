"""A mixture of experts alone on one H200, as the model calls it, routing included.

    python3 -m benchmarks.h200.experts [CONFIG_JSON] [--tokens 1 16 64]

DeepSeek-V2-Lite's sizes, or those of another config. Tiles of its products are compared by
expert_candidates.py.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path

import torch
from transformers import AutoConfig

from benchmarks.h200.attention_steps import graphed_seconds
from workers.layers.cuda.experts import GroupedMixture
from workers.layers.moe.mixture import MixtureOfExperts
from workers.layers.sharding import ShardContext
from workers.models.deepseek_family import deepseek_spec
from workers.models.llama_family import llama_family_spec
from workers.parallel.group import SingleRank

CONFIGS = Path(__file__).parent / "models"
NUM_TOKENS = (1, 4, 16, 64, 256, 1024, 8192)
REPEATS = 20


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


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("config", nargs="?", type=Path, default=CONFIGS / "deepseek-v2-lite.json")
    parser.add_argument("--tokens", nargs="+", type=int, default=list(NUM_TOKENS))
    arguments = parser.parse_args()
    device = torch.device("cuda")
    mixture = mixture_of(arguments.config, device)
    hidden_size = mixture.router.weight.shape[1]
    layer = GroupedMixture(mixture, is_summed=False)
    for num_tokens in arguments.tokens:
        x = torch.randn((num_tokens, hidden_size), dtype=torch.bfloat16, device=device)
        one = graphed_seconds(partial(layer, x), REPEATS)
        print(f"{num_tokens:5} layer {one * 1e6:8.1f} us", flush=True)


if __name__ == "__main__":
    main()
