"""An EAGLE-3 head (Li et al., 2025) as it is trained: plain torch, whole texts, no cache.

Tensors have the names of SpecForge's checkpoints. Trained as it is used: behind its first draft the
head reads its own states, so they are its input in training as well, several steps deep
("training-time test"). Knows no data, no loss and no engine.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

NUM_TAPS = 3
_FIRST_CERTAINTY = 0.4


@dataclass(frozen=True, slots=True)
class HeadShape:
    """taps: behind which layers of the target states are taken, ascending."""

    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    intermediate_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    taps: tuple[int, int, int]

    def config(self, max_position_embeddings: int) -> dict[str, Any]:
        """What config.json says of such a head."""
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "hidden_act": "silu",
            "hidden_size": self.target_hidden_size,
            "target_hidden_size": self.target_hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": 1,
            "num_attention_heads": self.num_q_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "max_position_embeddings": max_position_embeddings,
            "vocab_size": self.vocab_size,
            "draft_vocab_size": self.draft_vocab_size,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(self.taps)},
        }


class PairAttention(nn.Module):
    """Of pairs at an anchor each. Behind the first step an anchor sees the pairs up to its own with
    the target's states, and those that its own steps have made since."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        size, self._head_dim = shape.target_hidden_size, shape.head_dim
        q_size, kv_size = (n * shape.head_dim for n in (shape.num_q_heads, shape.num_kv_heads))
        self._theta = shape.rope_theta
        self._repeats = shape.num_q_heads // shape.num_kv_heads
        self.q_proj = nn.Linear(2 * size, q_size, bias=False)
        self.k_proj = nn.Linear(2 * size, kv_size, bias=False)
        self.v_proj = nn.Linear(2 * size, kv_size, bias=False)
        self.o_proj = nn.Linear(q_size, size, bias=False)

    def forward(self, inputs: Tensor, steps: list[tuple[Tensor, Tensor]]) -> Tensor:
        """inputs: (B, T, 2 * hidden_size). steps: keys and values of the steps before, to which
        this one's are added."""
        q, k, v = (self._heads(one(inputs)) for one in (self.q_proj, self.k_proj, self.v_proj))
        cos, sin = self._angles(q, len(steps))
        q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
        steps.append((self._for_every_head(k), self._for_every_head(v)))
        out = self._attended(q, steps).transpose(1, 2).flatten(2)
        attended: Tensor = self.o_proj(out)
        return attended

    def _attended(self, q: Tensor, steps: list[tuple[Tensor, Tensor]]) -> Tensor:
        (k, v), *own = steps
        if not own:
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        seen = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril()
        scores = (q @ k.transpose(-1, -2)).masked_fill(~seen, -math.inf)
        of_own = [(q * key).sum(-1, keepdim=True) for key, _ in own]
        weights = (torch.cat([scores, *of_own], -1) / math.sqrt(self._head_dim)).softmax(-1)
        width = q.shape[2]
        out = weights[..., :width] @ v
        for place, (_, value) in enumerate(own):
            out = out + weights[..., width + place, None] * value
        return out

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, self._head_dim).transpose(1, 2)

    def _for_every_head(self, x: Tensor) -> Tensor:
        return x.repeat_interleave(self._repeats, dim=1)

    def _angles(self, q: Tensor, step: int) -> tuple[Tensor, Tensor]:
        half = self._head_dim // 2
        exponents = torch.arange(half, device=q.device) / half
        positions = torch.arange(q.shape[2], device=q.device) + step
        angles = positions[:, None] * self._theta**-exponents
        return angles.cos().to(q.dtype), angles.sin().to(q.dtype)


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        size, middle = shape.target_hidden_size, shape.intermediate_size
        self.gate_proj = nn.Linear(size, middle, bias=False)
        self.up_proj = nn.Linear(size, middle, bias=False)
        self.down_proj = nn.Linear(middle, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class MidLayer(nn.Module):
    """The one layer, around the states' stream."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        size, eps = shape.target_hidden_size, shape.rms_norm_eps
        self.self_attn = PairAttention(shape)
        self.mlp = Mlp(shape)
        self.input_layernorm = nn.RMSNorm(size, eps)
        self.hidden_norm = nn.RMSNorm(size, eps)
        self.post_attention_layernorm = nn.RMSNorm(size, eps)

    def forward(
        self, embedded: Tensor, states: Tensor, steps: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """embedded, states (B, T, hidden_size) -> alike."""
        inputs = torch.cat((self.input_layernorm(embedded), self.hidden_norm(states)), -1)
        stream = states + self.self_attn(inputs, steps)
        out: Tensor = stream + self.mlp(self.post_attention_layernorm(stream))
        return out


class TrainedHead(nn.Module):
    """embedding: the target's, float (vocab_size, hidden_size), which stays as it is."""

    def __init__(self, shape: HeadShape, embedding: Tensor) -> None:
        super().__init__()
        self._embedding = (embedding,)
        size = shape.target_hidden_size
        self.fc = nn.Linear(NUM_TAPS * size, size, bias=False)
        self.midlayer = MidLayer(shape)
        self.norm = nn.RMSNorm(size, shape.rms_norm_eps)
        self.lm_head = nn.Linear(size, shape.draft_vocab_size, bias=False)

    def begin_as(self, norm: Tensor, head: Tensor) -> None:
        """Before training: states are read as the target reads its last ones, with less certainty.
        norm: (hidden_size,), its final one. head: (draft_vocab_size, hidden_size), the rows of its
        head."""
        with torch.no_grad():
            self.norm.weight.copy_(norm * _FIRST_CERTAINTY)
            self.lm_head.weight.copy_(head)

    def forward(self, token_ids: Tensor, taps: Tensor, num_steps: int) -> list[Tensor]:
        """token_ids: int64 (B, T + 1). taps: the target's, (B, T, NUM_TAPS * hidden_size), of all
        tokens but the last. Logits (B, T, draft_vocab_size) of each step: at anchor j of step k,
        of the token behind j + 1 + k, told all tokens up to that one. Behind a text's end: any."""
        # The stream stays in float32, whatever dtype the caller casts products to.
        states = self.fc(taps).float()
        steps, logits = list[tuple[Tensor, Tensor]](), list[Tensor]()
        for step in range(num_steps):
            ids = functional.pad(token_ids[:, 1 + step :], (0, step))
            states = self.midlayer(functional.embedding(ids, self._embedding[0]), states, steps)
            logits.append(self.lm_head(self.norm(states)))
        return logits


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
