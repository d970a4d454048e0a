"""Drafts by a checkpoint's layer for multi-token prediction: they are what transformers' own layer
makes of the same pairs; checkpoints without such a layer are refused by name."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

from tests.fakes.tiny_models import LATENT, MIXTURES, TinyModel, eager_reference, save_tiny_model
from tests.unit.workers.engine.test_eagle import DRAFT_IDS, change_tensors, made, recorded_run
from workers.errors import ConfigError, ModelLoadError

NUM_LAYERS = 2
PREFIX = f"model.layers.{NUM_LAYERS}."


def save_target(tiny: TinyModel, folder: Path) -> Any:
    """A model whose last layer becomes the one behind its last; transformers' model of all."""
    changes = {**tiny.changes, "num_hidden_layers": NUM_LAYERS + 1}
    save_tiny_model(replace(tiny, changes=changes), folder)
    whole = eager_reference(folder)
    size, generator = whole.config.hidden_size, torch.Generator().manual_seed(3)
    head = torch.zeros(whole.config.vocab_size, size)
    # Of most tokens it thinks nothing, so that many drafts are right where a text has no others.
    head[list(DRAFT_IDS)] = torch.randn(len(DRAFT_IDS), size, generator=generator)
    own = {
        "embed_tokens.weight": torch.randn(whole.config.vocab_size, size, generator=generator),
        "enorm.weight": 1.0 + 0.2 * torch.randn(size, generator=generator),
        "hnorm.weight": 1.0 + 0.2 * torch.randn(size, generator=generator),
        "eh_proj.weight": 0.1 * torch.randn(size, 2 * size, generator=generator),
        "shared_head.norm.weight": 1.0 + 0.2 * torch.randn(size, generator=generator),
        "shared_head.head.weight": head,
    }
    tensors = load_file(folder / "model.safetensors")
    tensors |= {PREFIX + name: tensor for name, tensor in own.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    change_config(folder, num_hidden_layers=NUM_LAYERS, num_nextn_predict_layers=1)
    return whole


def change_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    for name in ("mlp_layer_types", "layer_types"):
        if name in config:
            config[name] = config[name][:NUM_LAYERS]
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


class Oracle:
    """transformers' layers: whole texts, no cache."""

    def __init__(self, folder: Path, whole: Any) -> None:
        self._whole = whole
        self._own = {
            name.removeprefix(PREFIX): tensor
            for name, tensor in load_file(folder / "model.safetensors").items()
            if name.startswith(PREFIX)
        }

    @torch.inference_mode()
    def drafts(self, token_ids: Sequence[int], num_drafts: int) -> list[int]:
        body = self._whole.model
        hidden = body.embed_tokens(torch.tensor([list(token_ids[:-1])]))
        for layer in body.layers[:NUM_LAYERS]:
            hidden = self._behind(layer, hidden)
        states = body.norm(hidden)[0]
        ids, drafts = torch.tensor(token_ids[1:]), list[int]()
        for _ in range(num_drafts):
            embedded = functional.embedding(ids, self._own["embed_tokens.weight"])
            pair = torch.cat((self._norm("enorm", embedded), self._norm("hnorm", states)), -1)
            stream = functional.linear(pair, self._own["eh_proj.weight"])
            made = self._behind(body.layers[NUM_LAYERS], stream[None])[0, -1]
            made = self._norm("shared_head.norm", made)
            drafts.append(int((self._own["shared_head.head.weight"] @ made).argmax()))
            ids = torch.cat((ids, torch.tensor(drafts[-1:])))
            states = torch.cat((states, made[None]))
        return drafts

    def _behind(self, layer: Any, hidden: torch.Tensor) -> torch.Tensor:
        num_tokens = hidden.shape[1]
        positions = torch.arange(num_tokens)[None]
        mask = torch.full((num_tokens, num_tokens), float("-inf")).triu(1)[None, None]
        out = layer(
            hidden,
            attention_mask=mask,
            position_ids=positions,
            position_embeddings=self._whole.model.rotary_emb(hidden, positions),
        )
        states: torch.Tensor = out[0] if isinstance(out, tuple) else out
        return states

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        eps = self._whole.config.rms_norm_eps
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        return x * scale * self._own[f"{name}.weight"]


@pytest.mark.parametrize(
    "tiny", [LATENT["deepseek_v3"], MIXTURES["glm4_moe"]], ids=["deepseek_v3", "glm4_moe"]
)
def test_drafts_are_those_of_transformers_layer(tiny: TinyModel, tmp_path: Path) -> None:
    """Over chunks, cached prefixes, retraction, drafts that were right before, and none at all."""
    whole = save_target(tiny, tmp_path)
    prompts = [[*range(20, 50), 60 + index] for index in range(4)]
    settings = {"page_size": 4, "num_pages": 26, "max_step_tokens": 24}
    asked, stats = recorded_run(tmp_path, "", prompts, speculative="mtp", **settings)
    oracle = Oracle(tmp_path, whole)
    assert [one.drafts for one in asked[::3]] == [
        oracle.drafts(one.token_ids, len(one.drafts)) for one in asked[::3]
    ]
    assert stats.num_accepted_draft_tokens > 10
    assert stats.num_cached_prompt_tokens > 0
    assert stats.num_preemptions > 0


def test_trees_begin_with_the_layers_draft_and_latents_have_none(tmp_path: Path) -> None:
    whole = save_target(MIXTURES["glm4_moe"], tmp_path / "heads")
    trees = {"speculative": "mtp", "draft_tree": (2, 2), "page_size": 4}
    asked, stats = recorded_run(tmp_path / "heads", "", [[*range(20, 40)]], **trees)
    oracle = Oracle(tmp_path / "heads", whole)
    assert [one.drafts[:1] for one in asked] == [oracle.drafts(one.token_ids, 1) for one in asked]
    assert max(len(one.drafts) for one in asked) == 4
    assert stats.num_accepted_draft_tokens > 0
    save_target(LATENT["deepseek_v3"], tmp_path / "latents")
    with pytest.raises(ConfigError, match="keep keys and values of heads verify trees"):
        made(tmp_path / "latents", "", **trees)


def test_what_a_checkpoint_leaves_out_is_the_targets_and_the_rest_is_refused(
    tmp_path: Path,
) -> None:
    changes = {**LATENT["deepseek_v3"].changes, "num_nextn_predict_layers": 0}
    save_tiny_model(TinyModel("deepseek_v3", changes), tmp_path)
    with pytest.raises(ConfigError, match="has no layer for it"):
        made(tmp_path, "", speculative="mtp")
    save_target(LATENT["deepseek_v3"], tmp_path)
    prefix = PREFIX.replace(".", "__")
    change_tensors(tmp_path, **{f"{prefix}embed_tokens__weight": None})
    assert made(tmp_path, "", speculative="mtp").facts.architecture == "DeepseekV3ForCausalLM"
    change_tensors(tmp_path, **{f"{prefix}more__weight": torch.zeros(2)})
    with pytest.raises(ModelLoadError, match=r"has no use for: model\.layers\.2\.more\.weight"):
        made(tmp_path, "", speculative="mtp")
    change_tensors(tmp_path, **{f"{prefix}more__weight": None, f"{prefix}enorm__weight": None})
    with pytest.raises(ModelLoadError, match=r"lacks 1 tensors: model\.layers\.2\.enorm"):
        made(tmp_path, "", speculative="mtp")
    with pytest.raises(ConfigError, match="LlamaForCausalLM is not one of those"):
        made("builtin", "", speculative="mtp")
