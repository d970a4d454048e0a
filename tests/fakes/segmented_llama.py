"""LlamaForCausalLM cut at its attention, on any device: what segment graphs are tested with.

As the fused model does, it writes K and V before attention, those of padding included.
"""

import torch

from workers.models.llama import LlamaDecoderLayer, LlamaForCausalLM
from workers.models.segmented import SegmentedCausalLM


class SegmentedLlama(SegmentedCausalLM, LlamaForCausalLM):
    """pool: set by who makes a LlamaForCausalLM one of this class."""

    @property
    def num_layers(self):
        return len(self.model.layers)

    def begin(self, input_ids, places, new):
        residual = self.model.embed_tokens(input_ids)
        hidden = self.model._norms[0](residual)
        return self._inputs(self.model.layers[0], hidden, places, new), residual

    def attend(self, layer, inputs, batch):
        return self.model.layers[layer].self_attn.attn(*inputs, batch, save_kv_cache=False)

    def advance(self, layer, attended, residual, places, new):
        hidden = self._finish(layer, attended, residual)
        return self._inputs(self.model.layers[layer + 1], hidden, places, new)

    def finish_rows(self, attended, residual, rows):
        last = self.num_layers - 1
        return self._finish(last, attended.index_select(0, rows), residual.index_select(0, rows))

    def _finish(self, layer, attended, residual):
        """residual becomes the stream after the layer, in place."""
        module: LlamaDecoderLayer = self.model.layers[layer]
        delta = module.self_attn.o_proj(attended)
        hidden, stream = module.post_attention_layernorm.add_and_norm(delta, residual)
        hidden, stream = self.model._norms[layer + 1].add_and_norm(module.mlp(hidden), stream)
        residual.copy_(stream)
        return hidden

    def _inputs(self, layer, hidden, places, new):
        attention = layer.self_attn
        q, k, v = attention.qkv_proj(hidden).split(attention.qkv_proj.split_sizes, dim=-1)
        heads = [x.unflatten(-1, (-1, attention.head_dim)) for x in (q, k, v)]
        q, k = attention.rotary(places.positions, *attention.normalise_heads(*heads[:2]))
        layer_id = attention.attn.layer_id
        self.pool.set_kv_buffer(layer_id, places.cache_loc, k, heads[2])
        return tuple(_kept(x, new) for x in (q, k, heads[2]))


def _kept(tensor: torch.Tensor, new) -> torch.Tensor:
    return new(tuple(tensor.shape), dtype=tensor.dtype, device=tensor.device).copy_(tensor)
