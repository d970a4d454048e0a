"""Whether all values that a step keeps are numbers, of models whose last states do not tell.

A final state that is a number vouches for every token that it attended to. Where the last layers
see a window or a chunk, it has not attended to all tokens of its row, and some of them may have
left NaN in pages that somebody else gets: kernels load a page's unused tail and multiply it by
zero. What is no number stays none in a token's residual stream, so the last layer's values tell
for all layers. Knows pages and rows, no request.
"""

import torch

from attention.config import AttentionConfig
from attention.forward_batch import ForwardBatch
from attention.memory.token_to_kv_pool import TokenToKVPool


class ValueCheck:
    """Of one model and pool. layer_id: the last layer that stores K and V."""

    def __init__(self, token_to_kv_pool: TokenToKVPool, layer_id: int) -> None:
        self._account = token_to_kv_pool.account_of(layer_id)
        _, self._values = token_to_kv_pool.get_kv_buffer(layer_id)

    def mark(self, states: torch.Tensor, batch: ForwardBatch, tokens: torch.Tensor) -> torch.Tensor:
        """states (n, hidden_size), NaN where the state's row has a new token whose values are no
        numbers. tokens: int64 (n,), which of the batch's tokens they are of. Waits for nothing."""
        if batch.forward_mode.is_decode:  # every token has a state of its own
            return states
        values = self._values.flatten(0, 1).index_select(0, batch.cache_locs(self._account))
        is_bad = ~values.abs().amax(dim=(1, 2)).isfinite()
        num_bad = torch.cat((is_bad.new_zeros(1, dtype=torch.int64), is_bad.cumsum(0)))
        stops = batch.extend_seq_lens.cumsum(0)
        has_bad = num_bad[stops] > num_bad[stops - batch.extend_seq_lens]
        rows = torch.searchsorted(stops, tokens, right=True)
        return states.masked_fill(has_bad[rows].unsqueeze(1), torch.nan)


def value_checks(
    config: AttentionConfig, token_to_kv_pool: TokenToKVPool
) -> tuple[ValueCheck, ...]:
    """One where the last layer lets go of tokens."""
    if not config.bounded_retentions:
        return ()
    last = max(
        layer_id
        for layer_id, layer in enumerate(config.layers)
        if layer.kv_layer_id is None and not layer.max_encoder_tokens
    )
    return (ValueCheck(token_to_kv_pool, last),) if config.account_of(last) else ()
