"""DFlash drafters with random weights, as folders, and what one proposes, in plain torch.

The oracle is written from the published layout (z-lab's model code and configs). It knows no pool,
no page and no chunk: it reads a whole text and what transformers' own model makes of it.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

from tests.fakes.plain_layers import rms_normed, rotated

Tensors = dict[str, torch.Tensor]
BLOCK_SIZE = 6
MASK_TOKEN_ID = 3


def save_drafter(
    folder: Path, target: dict[str, Any], taps: Sequence[int] = (0, 2), **changes: Any
) -> Path:
    """target: its config.json. taps: its layers. changes: to the drafter's config.json."""
    own = {key: target[key] for key in ("vocab_size", "hidden_size", "rms_norm_eps")}
    config = {
        **own,
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "attention_bias": False,
        "max_position_embeddings": 64,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "layer_types": ["full_attention"] * 2,
        "block_size": BLOCK_SIZE,
        "num_target_layers": target["num_hidden_layers"],
        "dflash_config": {"mask_token_id": MASK_TOKEN_ID, "target_layer_ids": list(taps)},
        **changes,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(_random_tensors(config), folder / "model.safetensors")
    return folder


def _random_tensors(config: dict[str, Any]) -> Tensors:
    size, middle = config["hidden_size"], config["intermediate_size"]
    head_dim, has_bias = config["head_dim"], config["attention_bias"]
    q_size = config["num_attention_heads"] * head_dim
    kv_size = config["num_key_value_heads"] * head_dim
    generator = torch.Generator().manual_seed(3)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * (0.3 if len(shape) > 1 else 0.2)

    num_taps = len(config["dflash_config"]["target_layer_ids"])
    tensors = {
        "fc.weight": noise(size, num_taps * size),
        "hidden_norm.weight": 1.0 + noise(size),
        "norm.weight": 1.0 + noise(size),
    }
    for layer in range(config["num_hidden_layers"]):
        own = {
            "self_attn.q_proj.weight": noise(q_size, size),
            "self_attn.k_proj.weight": noise(kv_size, size),
            "self_attn.v_proj.weight": noise(kv_size, size),
            "self_attn.o_proj.weight": noise(size, q_size),
            "self_attn.q_norm.weight": 1.0 + noise(head_dim),
            "self_attn.k_norm.weight": 1.0 + noise(head_dim),
            "mlp.gate_proj.weight": noise(middle, size),
            "mlp.up_proj.weight": noise(middle, size),
            "mlp.down_proj.weight": noise(size, middle),
            "input_layernorm.weight": 1.0 + noise(size),
            "post_attention_layernorm.weight": 1.0 + noise(size),
        }
        if has_bias:
            sizes = {"q": q_size, "k": kv_size, "v": kv_size, "o": size}
            own |= {f"self_attn.{one}_proj.bias": noise(n) for one, n in sizes.items()}
        tensors |= {f"layers.{layer}.{name}": tensor for name, tensor in own.items()}
    return tensors


class DFlashOracle:
    """The drafter of a folder beside transformers' model of the target."""

    def __init__(self, folder: Path, target: Any) -> None:
        self._config = json.loads((folder / "config.json").read_text())
        stored = load_file(folder / "model.safetensors")
        self._tensors = {name: tensor.float() for name, tensor in stored.items()}
        self._target = target

    @torch.inference_mode()
    def drafts(self, token_ids: Sequence[int], num_drafts: int) -> list[int]:
        """What the drafter takes for likeliest behind a text of two tokens at least."""
        states = self.states(token_ids, num_drafts)[1:]
        likeliest: list[int] = self._target.lm_head(states).argmax(-1).tolist()
        return likeliest

    @torch.inference_mode()
    def states(self, token_ids: Sequence[int], num_drafts: int) -> torch.Tensor:
        """Final ones of the block that the text's last token begins, (num_drafts + 1, size)."""
        own = self._config["dflash_config"]
        read = self._target.model(torch.tensor([list(token_ids[:-1])]), output_hidden_states=True)
        taps = [read.hidden_states[layer + 1][0] for layer in own["target_layer_ids"]]
        fused = functional.linear(torch.cat(taps, -1), self._tensors["fc.weight"])
        context = self._norm("hidden_norm", fused)
        block = torch.tensor([token_ids[-1]] + [own["mask_token_id"]] * num_drafts)
        stream = functional.embedding(block, self._target.model.embed_tokens.weight)
        for layer in range(self._config["num_hidden_layers"]):
            stream = self._behind(f"layers.{layer}", stream, context)
        return self._norm("norm", stream)

    def _behind(self, layer: str, stream: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        normed = self._norm(f"{layer}.input_layernorm", stream)
        attended = self._attended(f"{layer}.self_attn", normed, context)
        stream = stream + self._project(f"{layer}.self_attn.o_proj", attended)
        normed = self._norm(f"{layer}.post_attention_layernorm", stream)
        gate = functional.silu(self._project(f"{layer}.mlp.gate_proj", normed))
        up = self._project(f"{layer}.mlp.up_proj", normed)
        return stream + self._project(f"{layer}.mlp.down_proj", gate * up)

    def _attended(self, name: str, block: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        """Every token of the block sees the context and the whole block."""
        size, seen = self._config["head_dim"], torch.cat((context, block))
        positions, theta = torch.arange(len(seen)), self._config["rope_theta"]
        q = self._project(f"{name}.q_proj", block).unflatten(-1, (-1, size))
        k, v = (self._project(f"{name}.{one}_proj", seen).unflatten(-1, (-1, size)) for one in "kv")
        q = rotated(self._norm(f"{name}.q_norm", q), positions[len(context) :], theta)
        k = rotated(self._norm(f"{name}.k_norm", k), positions, theta)
        repeats = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(repeats, dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(size)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return rms_normed(x, self._tensors[f"{name}.weight"], self._config["rms_norm_eps"])

    def _project(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(
            x, self._tensors[f"{name}.weight"], self._tensors.get(f"{name}.bias")
        )
