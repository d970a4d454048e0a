"""A layer of the gated delta rule (Qwen3-Next), cut over ranks by heads.

What tokens compute by themselves is computed for all of the flat batch; convolution and rule run
over rows of equal length, from their states. Knows no slot.
"""

import torch
from torch import nn
from torch.nn import functional

from attention.memory.slot_states import StateEntry, StateTensor
from workers.layers.delta.choice import delta_rule_for
from workers.layers.delta.convolution import causal_convolution
from workers.layers.delta.heads import DeltaHeads
from workers.layers.delta.parameters import ConvolutionTaps, DecayParameters
from workers.layers.delta.rule import DeltaInputs
from workers.layers.linear import ColumnParallelLinear, RowParallelLinear
from workers.layers.norm import RMSNorm
from workers.layers.sharding import ShardContext

State = tuple[torch.Tensor, ...]


class GatedDeltaNet(nn.Module):
    """Names are the checkpoint's. state_entry: what a rank keeps of a request: the convolution's
    inputs (channels, taps - 1) in the model's dtype, and the rule's state in float32."""

    def __init__(
        self, heads: DeltaHeads, hidden_size: int, eps: float, shard: ShardContext
    ) -> None:
        super().__init__()
        self.heads = own = heads.of_rank(shard.tp.size)
        widths = heads.channels + heads.values, 2 * heads.value_heads
        self.in_proj_qkvz = ColumnParallelLinear(hidden_size, widths[0], False, shard)
        self.in_proj_ba = ColumnParallelLinear(hidden_size, widths[1], False, shard)
        self.conv1d = ConvolutionTaps(heads, shard)
        self.decay = DecayParameters(heads, shard)
        self.norm = RMSNorm(heads.value_dim, eps, shard)
        self.out_proj = RowParallelLinear(heads.values, hidden_size, False, shard)
        self._rule = delta_rule_for(shard.device)
        self.state_entry = StateEntry(
            (
                StateTensor((own.channels, own.taps - 1), shard.dtype),
                StateTensor((own.value_heads, own.key_dim, own.value_dim), torch.float32),
            )
        )

    def projected(self, hidden: torch.Tensor) -> tuple[State, torch.Tensor]:
        """hidden: normalised input (n, hidden_size) -> what run_rows takes of each token, and the
        gate of what it gives, (n, value_heads, value_dim)."""
        own, share = self.heads, self.heads.share
        # By key head: its query, its key, the values and the gates of its value heads.
        by_head = self.in_proj_qkvz(hidden).unflatten(-1, (own.key_heads, -1))
        of_values = share * own.value_dim
        q, k, v, gate = by_head.split((own.key_dim, own.key_dim, of_values, of_values), dim=-1)
        mixed = torch.cat([part.flatten(1) for part in (q, k, v)], dim=-1)
        b, a = self.in_proj_ba(hidden).unflatten(-1, (own.key_heads, -1)).chunk(2, dim=-1)
        beta, g = torch.sigmoid(b.flatten(1)), self.decay(a.flatten(1))
        return (mixed, g, beta), gate.reshape(len(hidden), own.value_heads, own.value_dim)

    def run_rows(self, tokens: State, state: State | None) -> tuple[torch.Tensor, State]:
        """tokens: of rows of equal length, mixed, g and beta as projected says -> (rows, length,
        value_heads, value_dim) and the state behind them."""
        own = self.heads
        mixed, g, beta = tokens
        inputs_before, state_before = (None, None) if state is None else state
        mixed, inputs_after = causal_convolution(mixed, self.conv1d.weight, inputs_before)
        q, k, v = torch.split(mixed, [own.keys, own.keys, own.values], dim=-1)
        rows = mixed.shape[:2]
        given = DeltaInputs(
            q.reshape(*rows, own.key_heads, own.key_dim),
            k.reshape(*rows, own.key_heads, own.key_dim),
            v.reshape(*rows, own.value_heads, own.value_dim),
            g,
            beta,
        )
        made, after = self._rule(given, state_before)
        return made, (inputs_after, after)

    def gated(self, made: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """made, gate (n, value_heads, value_dim) -> what out_proj takes, (n, values)."""
        out: torch.Tensor = self.norm(made) * functional.silu(gate.float())
        return out.to(made.dtype).flatten(1)
