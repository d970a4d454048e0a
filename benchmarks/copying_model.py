"""A model that copies, made by hand, and an EAGLE-3 head for it: their acceptance is known.

Behind a text that has come to a token for the second time the model goes on with what followed the
first time: an induction head (Olsson et al., 2022) of two layers. The first layer attends to the
position before and notes its token; the second one attends to where the noted token is the current
one, and names that place's token. Rotary frequencies fall so fast that a head has both kinds: pairs
that turn find the position before, pairs that as good as stand compare tokens at any distance.

The head does in its one layer what the model does in two, since a pair has a token and the state of
the one before. As a model and as a head both are right at every position or at none: a drafter that
reads another window, or counts positions from elsewhere, loses its acceptance.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

Tensors = dict[str, torch.Tensor]

FIRST_ID = 0
"""Begins every text and comes once: the first position has none before it."""
NUM_LAYERS = 4
"""Two that compute, two that pass on: a head taps three layers, none of them the last."""
_HEAD_DIM = 256
_CODE = 128
_WIDTH = 512
_TOKEN, _BEFORE, _NEXT = slice(0, _CODE), slice(_CODE, 2 * _CODE), slice(2 * _CODE, 3 * _CODE)
"""Of the stream: the code of a position's token, of the one before, of what is named."""
_ONE = 3 * _CODE
"""An element of the stream that is 1 everywhere."""
_THETA = 1e28
_TURNING = 20
"""Pairs of a head that tell positions apart; those from a quarter on hardly turn."""
_LEAST_GAP = 0.6
_DISTANCES_AT_ONCE = 1 << 16
_POSITION_SCORE, _TOKEN_SCORE, _LOGIT = 80.0, 60.0, 20.0
_MIDDLE = 16
_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class CopyingModel:
    """vocab_size: tokens that a text can have, FIRST_ID among them, each of them once before it
    repeats. max_context_len: up to where it copies."""

    vocab_size: int
    max_context_len: int
    seed: int = 0

    def save(self, folder: Path) -> Path:
        """Writes the model in Llama's layout, float32, and a tokenizer whose tokens are numbers;
        returns the folder."""
        check_positions(self.max_context_len)
        _save(folder, {**self._config(1), "num_hidden_layers": NUM_LAYERS}, self._tensors())
        tokenizer = Tokenizer(WordLevel({str(one): one for one in range(self.vocab_size)}, "0"))
        tokenizer.save(str(folder / "tokenizer.json"))
        return folder

    def save_head(self, folder: Path) -> Path:
        """Writes its EAGLE-3 head in SpecForge's layout, float32; returns the folder."""
        config = {
            **self._config(2),
            "architectures": ["LlamaForCausalLMEagle3"],
            "num_hidden_layers": 1,
            "draft_vocab_size": self.vocab_size,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(range(NUM_LAYERS - 1))},
        }
        return _save(folder, config, _head_tensors(self._codes()))

    def _config(self, num_heads: int) -> dict[str, Any]:
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab_size,
            "hidden_size": _WIDTH,
            "intermediate_size": _MIDDLE,
            "num_attention_heads": num_heads,
            "num_key_value_heads": num_heads,
            "head_dim": _HEAD_DIM,
            "hidden_act": "silu",
            "rms_norm_eps": _EPS,
            "rope_theta": _THETA,
            "max_position_embeddings": self.max_context_len,
            "tie_word_embeddings": False,
            "bos_token_id": FIRST_ID,
            "eos_token_id": None,
            "dtype": "float32",
        }

    def _codes(self) -> torch.Tensor:
        """A token's, of length 1, unlike all others: (vocab_size, _CODE)."""
        generator = torch.Generator().manual_seed(self.seed)
        noise = torch.randn(self.vocab_size, _CODE, generator=generator)
        return noise / noise.norm(dim=-1, keepdim=True)

    def _tensors(self) -> Tensors:
        codes = self._codes()
        embedding = torch.zeros(self.vocab_size, _WIDTH)
        embedding[:, _TOKEN], embedding[:, _ONE] = codes, 1.0
        tensors = {
            "model.embed_tokens.weight": embedding,
            "model.norm.weight": torch.ones(_WIDTH),
            "lm_head.weight": _into(_WIDTH, _NEXT, codes * (_LOGIT / _scale(4))),
        }
        attentions = (_position_before(), _same_token(), _nothing(), _nothing())
        for layer, attention in enumerate(attentions):
            layer_tensors = {
                **{f"self_attn.{name}.weight": tensor for name, tensor in attention.items()},
                **_no_mlp(),
                "input_layernorm.weight": torch.ones(_WIDTH),
                "post_attention_layernorm.weight": torch.ones(_WIDTH),
            }
            tensors |= {f"model.layers.{layer}.{n}": tensor for n, tensor in layer_tensors.items()}
        return tensors


def check_positions(num_positions: int) -> None:
    """Raises ValueError where positions so far apart cannot be told from neighbours."""
    frequencies = _frequencies().double()
    for distances in torch.arange(1, num_positions, dtype=torch.float64).split(_DISTANCES_AT_ONCE):
        gaps = (1.0 - torch.cos(distances[:, None] * frequencies)).sum(-1)
        if float(gaps.min()) < _LEAST_GAP:
            raise ValueError(f"{num_positions} positions are more than the rotary pairs tell apart")


def _frequencies() -> torch.Tensor:
    """Radians a position, of the pairs that turn."""
    return _THETA ** (-torch.arange(_TURNING) / (_HEAD_DIM // 2))


def _scale(num_ones: int) -> float:
    """What a norm multiplies a stream by that is num_ones vectors of length 1."""
    return float((_WIDTH / num_ones) ** 0.5)


def _into(width: int, columns: slice, values: torch.Tensor) -> torch.Tensor:
    weight = torch.zeros(len(values), width)
    weight[:, columns] = values
    return weight


def _turned(column: int, width: int, positions_ahead: int, scale: float) -> torch.Tensor:
    """A projection (_HEAD_DIM, width) of the 1 at column: the turning pairs, as that many positions
    ahead. Two of them, one ahead of the other, meet at that distance."""
    angles = -positions_ahead * _frequencies()
    amplitude = (_POSITION_SCORE * _HEAD_DIM**0.5) ** 0.5 / scale
    weight = torch.zeros(_HEAD_DIM, width)
    weight[:_TURNING, column] = amplitude * angles.cos()
    half = _HEAD_DIM // 2
    weight[half : half + _TURNING, column] = amplitude * angles.sin()
    return weight


def _compared(first: int, width: int, scale: float) -> torch.Tensor:
    """A projection (_HEAD_DIM, width) of the code from first on, to pairs that hardly turn."""
    amplitude = (_TOKEN_SCORE * _HEAD_DIM**0.5) ** 0.5 / scale
    quarter = _HEAD_DIM // 4
    standing = torch.cat(
        (torch.arange(quarter, 2 * quarter), torch.arange(3 * quarter, 4 * quarter))
    )
    weight = torch.zeros(_HEAD_DIM, width)
    weight[standing, torch.arange(first, first + _CODE)] = amplitude
    return weight


def _value(first: int, width: int, scale: float) -> torch.Tensor:
    weight = torch.zeros(_HEAD_DIM, width)
    weight[torch.arange(_CODE), torch.arange(first, first + _CODE)] = 1.0 / scale
    return weight


def _written(place: slice, sign: float = 1.0) -> torch.Tensor:
    """An output projection (_WIDTH, _HEAD_DIM) of a value to a place of the stream."""
    weight = torch.zeros(_WIDTH, _HEAD_DIM)
    weight[place, :_CODE] = sign * torch.eye(_CODE)
    return weight


def _position_before() -> Tensors:
    scale = _scale(2)
    return {
        "q_proj": _turned(_ONE, _WIDTH, 1, scale),
        "k_proj": _turned(_ONE, _WIDTH, 0, scale),
        "v_proj": _value(_TOKEN.start, _WIDTH, scale),
        "o_proj": _written(_BEFORE),
    }


def _same_token() -> Tensors:
    scale = _scale(3)
    return {
        "q_proj": _compared(_TOKEN.start, _WIDTH, scale),
        "k_proj": _compared(_BEFORE.start, _WIDTH, scale),
        "v_proj": _value(_TOKEN.start, _WIDTH, scale),
        "o_proj": _written(_NEXT),
    }


def _nothing() -> Tensors:
    inputs = dict.fromkeys(("q_proj", "k_proj", "v_proj"), torch.zeros(_HEAD_DIM, _WIDTH))
    return {**inputs, "o_proj": torch.zeros(_WIDTH, _HEAD_DIM)}


def _no_mlp() -> Tensors:
    inputs = dict.fromkeys(
        ("mlp.gate_proj.weight", "mlp.up_proj.weight"), torch.zeros(_MIDDLE, _WIDTH)
    )
    return {**inputs, "mlp.down_proj.weight": torch.zeros(_WIDTH, _MIDDLE)}


def _head_tensors(codes: torch.Tensor) -> Tensors:
    """Two heads: one names what followed the token, the other one takes back what the draft before
    named, which is the token."""
    fused = torch.zeros(_WIDTH, 3 * _WIDTH)
    kept = torch.tensor([*range(_CODE), _ONE])
    fused[kept, kept] = 1.0
    scale, width = _scale(2), 2 * _WIDTH
    state = _WIDTH
    projections = {
        "q_proj": (_compared(0, width, scale), _turned(_ONE, width, 0, scale)),
        "k_proj": (_compared(state, width, scale), _turned(_ONE, width, 0, scale)),
        "v_proj": (_value(0, width, scale), _value(0, width, scale)),
    }
    tensors = {
        f"midlayer.self_attn.{name}.weight": torch.cat(heads) for name, heads in projections.items()
    }
    tensors["midlayer.self_attn.o_proj.weight"] = torch.cat(
        (_written(_NEXT), _written(_NEXT, sign=-1.0)), dim=1
    )
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    return {
        **tensors,
        **{f"midlayer.{name}": tensor for name, tensor in _no_mlp().items()},
        **{f"midlayer.{name}.weight": torch.ones(_WIDTH) for name in norms},
        "fc.weight": fused,
        "norm.weight": torch.ones(_WIDTH),
        "lm_head.weight": _into(_WIDTH, _NEXT, codes),
    }


def _save(folder: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    # One tensor may stand for several projections; files have none that share memory.
    save_file(
        {name: tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors"
    )
    return folder
