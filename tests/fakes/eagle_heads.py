"""EAGLE-3 heads with random weights, as folders, and what one proposes, in plain torch.

The oracle knows no pool, no page and no chunk: it reads a whole text and what transformers' own
model makes of it.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

from attention import LayerAttentionConfig
from tests.fakes.plain_layers import rms_normed, rotated
from workers.layers.formats.recipe import EVERY_MODULE, FormatRule, WeightRecipe
from workers.layers.formats.scaled import RoundedToFp8
from workers.layers.rope_frequencies import RopeSpec
from workers.models.eagle_head import EagleSpec
from workers.models.llama_family import LlamaFamilySpec

Tensors = dict[str, torch.Tensor]
ROUNDED = WeightRecipe("rounded", (FormatRule((EVERY_MODULE,), RoundedToFp8()),))


def eagle_spec(**changes: Any) -> EagleSpec:
    """Of a head without a file: changes are to its layer's spec."""
    head_dim = changes.get("head_dim", 64)
    own = {
        "vocab_size": 131,
        "hidden_size": 256,
        "intermediate_size": 96,
        "num_q_heads": 4,
        "num_kv_heads": 2,
        "head_dim": head_dim,
        "rms_norm_eps": 1e-5,
        "rope": RopeSpec("default", 1e4, head_dim, 256, {}),
        **dict.fromkeys(("has_qkv_bias", "has_o_bias", "has_mlp_bias", "has_qk_norm"), False),
        "has_tied_embeddings": False,
        "layers": (LayerAttentionConfig(),),
    }
    layer = LlamaFamilySpec(**{**own, **changes})
    return EagleSpec(layer, target_hidden_size=layer.hidden_size, draft_vocab_size=77)


def save_head(
    folder: Path, target: dict[str, Any], draft_ids: Sequence[int], **changes: Any
) -> Path:
    """target: its config.json. draft_ids: the target's ids of the head's tokens, ascending.
    changes: to the head's config.json."""
    own = {key: target[key] for key in ("vocab_size", "hidden_size", "rms_norm_eps")}
    config = {
        **own,
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        "draft_vocab_size": len(draft_ids),
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
        **changes,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(_random_tensors(config, draft_ids), folder / "model.safetensors")
    return folder


def change_tensors(folder: Path, **changes: torch.Tensor | None) -> None:
    """None takes a tensor away; a name's dots are written as two underscores."""
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in changes.items():
        key = name.replace("__", ".")
        if tensor is None:
            del tensors[key]
        else:
            tensors[key] = tensor
    save_file(tensors, folder / "model.safetensors")


def _random_tensors(config: dict[str, Any], draft_ids: Sequence[int]) -> Tensors:
    size, middle = config["hidden_size"], config["intermediate_size"]
    q_size = config["num_attention_heads"] * config["head_dim"]
    kv_size = config["num_key_value_heads"] * config["head_dim"]
    ids = torch.tensor(draft_ids)
    known = torch.zeros(config["vocab_size"], dtype=torch.bool)
    known[ids] = True
    generator = torch.Generator().manual_seed(3)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * (0.1 if len(shape) > 1 else 0.2)

    return {
        "fc.weight": noise(size, 3 * config.get("target_hidden_size", size)),
        "midlayer.self_attn.q_proj.weight": noise(q_size, 2 * size),
        "midlayer.self_attn.k_proj.weight": noise(kv_size, 2 * size),
        "midlayer.self_attn.v_proj.weight": noise(kv_size, 2 * size),
        "midlayer.self_attn.o_proj.weight": noise(size, q_size),
        "midlayer.mlp.gate_proj.weight": noise(middle, size),
        "midlayer.mlp.up_proj.weight": noise(middle, size),
        "midlayer.mlp.down_proj.weight": noise(size, middle),
        "midlayer.hidden_norm.weight": 1.0 + noise(size),
        "midlayer.input_layernorm.weight": 1.0 + noise(size),
        "midlayer.post_attention_layernorm.weight": 1.0 + noise(size),
        "norm.weight": 1.0 + noise(size),
        "lm_head.weight": noise(len(ids), size),
        "d2t": ids - torch.arange(len(ids)),
        "t2d": known,
    }


class HeadOracle:
    """The head of a folder beside transformers' model of the target."""

    def __init__(self, folder: Path, target: Any) -> None:
        self._config = json.loads((folder / "config.json").read_text())
        stored = load_file(folder / "model.safetensors")
        self._tensors = {
            name: tensor.float() if tensor.is_floating_point() else tensor
            for name, tensor in stored.items()
        }
        self._target = target

    @torch.inference_mode()
    def drafts(self, token_ids: Sequence[int], num_drafts: int) -> list[int]:
        """What the head takes for likeliest behind a text of two tokens at least."""
        layers = self._config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
        body = self._target.model(torch.tensor([list(token_ids[:-1])]), output_hidden_states=True)
        taps = [body.hidden_states[layer + 1][0] for layer in layers]
        states = functional.linear(torch.cat(taps, -1), self._tensors["fc.weight"])
        ids, drafts = torch.tensor(token_ids[1:]), list[int]()
        for _ in range(num_drafts):
            made = self._last_state(ids, states)
            normed = self._norm("norm", made)
            own = int(functional.linear(normed, self._tensors["lm_head.weight"]).argmax())
            drafts.append(own + int(self._tensors["d2t"][own]))
            ids = torch.cat((ids, torch.tensor(drafts[-1:])))
            states = torch.cat((states, made[None]))
        return drafts

    def _last_state(self, ids: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        embedding = self._tensors.get("embed_tokens.weight", self._target.model.embed_tokens.weight)
        embedded = self._norm("midlayer.input_layernorm", functional.embedding(ids, embedding))
        inputs = torch.cat((embedded, self._norm("midlayer.hidden_norm", states)), -1)
        stream = states[-1] + self._project("self_attn.o_proj", self._attended(inputs))
        normed = self._norm("midlayer.post_attention_layernorm", stream)
        gate = functional.silu(self._project("mlp.gate_proj", normed))
        return stream + self._project("mlp.down_proj", gate * self._project("mlp.up_proj", normed))

    def _attended(self, inputs: torch.Tensor) -> torch.Tensor:
        """Of the last pair: it sees all."""
        size = self._config["head_dim"]
        positions = torch.arange(len(inputs))
        q = self._project("self_attn.q_proj", inputs[-1:]).unflatten(-1, (-1, size))
        k, v = (
            self._project(f"self_attn.{name}", inputs).unflatten(-1, (-1, size))
            for name in ("k_proj", "v_proj")
        )
        q, k = rotated(q, positions[-1:], 10000.0), rotated(k, positions, 10000.0)
        repeats = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(repeats, dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(size)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten()

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return rms_normed(x, self._tensors[f"{name}.weight"], self._config["rms_norm_eps"])

    def _project(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self._tensors[f"midlayer.{name}.weight"])
