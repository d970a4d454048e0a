"""A decoder of transformers with its own attention, run row by row over the paged pool. One rank.

The model's own code computes everything, attention too. What it takes for its cache writes the
step's tokens into the request's pages and gives back all that lie there. So a model whose code
makes no use of the attention interface has pages, a prefix cache and chunks as every other one has;
slowly, since rows of different lengths do not share a call (decision 0060).
"""

import logging
from collections.abc import Iterator, Mapping, Sequence

import torch

from attention import AttentionHeads, ForwardBatch, LayerAttentionConfig
from attention.memory.req_to_token_pool import ReqToTokenPool
from attention.memory.token_to_kv_pool import TokenToKVPool
from workers.errors import ConfigError
from workers.loading.model_folder import text_config_of
from workers.models.base import AttentionGeometry, CausalLM
from workers.models.token_inputs import ModelOutput, TokenInputs
from workers.models.transformers_attention import LayerCall, geometry_of
from workers.models.transformers_head import logits_of
from workers.models.transformers_parts import BodyAndHead
from workers.models.transformers_probing import probing
from workers.models.transformers_row_body import RowBody
from workers.models.transformers_row_cache import CachePlace
from workers.models.transformers_row_groups import RowGroup, row_groups
from workers.models.transformers_row_probe import RowFacts, probe_rows, random_rows

logger = logging.getLogger(__name__)

# Of one call: their keys and values are copied together for each layer.
MAX_GATHERED_TOKENS = 16384


class RowByRowCausalLM(CausalLM):
    """parts: in eval mode, on its device, with attention that is transformers' own.

    Raises ModelLoadError, which says what the model does, when it needs more of earlier tokens than
    keys and values.
    """

    def __init__(self, parts: BodyAndHead) -> None:
        super().__init__()
        self.body, self.head = parts.body, parts.head
        self._rows = RowBody(parts.head, parts.body)
        name = type(parts.head).__name__
        with probing("fails"):
            facts = self._probe(text_config_of(parts.head.config))
        self.geometry = _geometry_of(list(facts.heads.values()))
        self._layer_ids = {place: layer_id for layer_id, place in enumerate(facts.heads)}
        self._continues_many = facts.continues_many
        self._pools: tuple[ReqToTokenPool, TokenToKVPool] | None = None
        logger.warning(
            "%s computes attention in transformers' own code, row by row: requests of unlike "
            "lengths share no work in a step, so that many take as long as one after the other%s",
            name,
            "" if facts.continues_many else ", and prompts longer than a step go token by token",
        )

    @torch.inference_mode()
    def _probe(self, config: object) -> RowFacts:
        rows = random_rows(config, self.head.device)
        facts = probe_rows(self._rows, config, rows)
        self.vocab_size = self.compute_logits(self._rows.run_whole(rows)[0]).shape[-1]
        return facts

    def prepare(self, req_to_token_pool: ReqToTokenPool, token_to_kv_pool: TokenToKVPool) -> None:
        """Raises ConfigError for an FP8 pool: what lies there would need its scales."""
        k, _ = token_to_kv_pool.get_kv_buffer(0)
        if k.itemsize == 1:
            raise ConfigError("an FP8 KV cache is not for models that run row by row")
        self._pools = req_to_token_pool, token_to_kv_pool

    def forward(self, tokens: TokenInputs, forward_batch: ForwardBatch) -> ModelOutput:
        if self._pools is None:
            raise RuntimeError("prepare must run before the first step")
        hidden = None
        for group in calls_of(forward_batch, self._continues_many):
            kept = PagedRows(self._layer_ids, *self._pools, forward_batch, group)
            of_rows = self._rows.run(tokens.ids[group.tokens], group.kind, kept)
            if hidden is None:
                hidden = of_rows.new_empty(len(tokens.ids), of_rows.shape[-1])
            hidden[group.tokens] = of_rows
        if hidden is None:
            raise ValueError("a step has no row")
        return ModelOutput(hidden)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return logits_of(self.head, hidden).float()


class PagedRows:
    """Keys and values of one group of rows, in the pool. group.kind: how many tokens each row has
    there before this pass."""

    def __init__(
        self,
        layer_ids: Mapping[CachePlace, int],
        req_to_token_pool: ReqToTokenPool,
        token_to_kv_pool: TokenToKVPool,
        batch: ForwardBatch,
        group: RowGroup[int],
    ) -> None:
        num_rows, num_new = group.tokens.shape
        self._layer_ids = layer_ids
        self._pool = token_to_kv_pool
        self._new_locs = batch.out_cache_loc[group.tokens].flatten()
        table = req_to_token_pool.req_to_token[:, : group.kind + num_new]
        self._all_locs = table.index_select(0, group.slots).flatten()
        self._num_rows = num_rows

    def exchange(
        self, place: CachePlace, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As KeptKV.exchange; what the pool keeps is rounded to its dtype."""
        layer_id = self._layer_ids[place]
        self._pool.set_kv_buffer(
            layer_id,
            self._new_locs,
            k.transpose(1, 2).flatten(0, 1),
            v.transpose(1, 2).flatten(0, 1),
        )
        keys, values = self._pool.get_kv_buffer(layer_id)
        return self._gathered(keys, k.dtype), self._gathered(values, v.dtype)

    def _gathered(self, stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """(rows, heads, all tokens, dim), as it would lie in a cache of transformers' own."""
        tokens = stored.flatten(0, 1).index_select(0, self._all_locs)
        of_rows = tokens.view(self._num_rows, -1, *tokens.shape[1:])
        return of_rows.to(dtype).transpose(1, 2).contiguous()


def _geometry_of(heads: Sequence[AttentionHeads]) -> AttentionGeometry:
    """A layer of the pool for each."""
    calls = [LayerCall(one, one.head_dim**-0.5, LayerAttentionConfig(), None) for one in heads]
    return geometry_of(calls)


def calls_of(batch: ForwardBatch, continues_many: bool) -> Iterator[RowGroup[int]]:
    """Rows of equal length and equal prefix, as many as one call may gather."""
    for group in row_groups(batch, batch.extend_prefix_lens_cpu.tolist()):
        num_rows, num_new = group.tokens.shape
        num_gathered = group.kind + num_new
        at_once = max(1, MAX_GATHERED_TOKENS // num_gathered)
        for first in range(0, num_rows, at_once):
            rows = slice(first, first + at_once)
            part = RowGroup(group.tokens[rows], group.slots[rows], group.kind, group.rows[rows])
            yield from [part] if continues_many or group.kind == 0 else _one_by_one(part)


def _one_by_one(group: RowGroup[int]) -> Iterator[RowGroup[int]]:
    """The group's tokens, each in a call of its own on top of those before."""
    for index, tokens in enumerate(torch.split(group.tokens, 1, dim=1)):
        yield RowGroup(tokens, group.slots, group.kind + index, group.rows)
