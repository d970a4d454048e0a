"""Encoders in a step: before its rows run, inputs of admitted requests are read and cached.

Only the tables, the pool and the lengths here change; a launch that fails can be repeated. Knows
plans, no request and no particular model.
"""

import numpy as np
import numpy.typing as npt
import torch

from attention import AttentionConfig
from attention.memory.req_to_token_pool import ReqToTokenPool
from attention.memory.token_to_kv_pool import TokenToKVPool
from workers.models.request_encoder import RequestEncoder
from workers.sampling.transfer import upload
from workers.scheduler.encoder_plan import EncoderGrant, EncoderPlan
from workers.scheduler.plan import IntArray


class EncoderStage:
    """One rank's. account: the encoder's, of both pools."""

    def __init__(
        self,
        encoder: RequestEncoder,
        account: int,
        req_to_token_pool: ReqToTokenPool,
        token_to_kv_pool: TokenToKVPool,
    ) -> None:
        self._encoder = encoder
        self._account = account
        self._table = req_to_token_pool
        self._pool = token_to_kv_pool
        device = req_to_token_pool.req_to_token.device
        self._device = device
        page_size = token_to_kv_pool.page_size
        self._page_size = page_size
        self._page_offsets = torch.arange(page_size, dtype=torch.int32, device=device)
        self._lens = np.zeros(req_to_token_pool.max_running_requests, dtype=np.int32)

    def apply(self, plan: EncoderPlan) -> None:
        """Carry the plan out, before its step and after all earlier ones."""
        if len(plan.cleared):
            cleared = upload([plan.cleared.astype(np.int64)], self._device)
            self._pool.clear_bounded(self._account, *cleared)
        for grant in plan.grants:
            self._grant(grant)

    def lens(self, slots: IntArray) -> npt.NDArray[np.int32]:
        """ForwardBatch.encoder_lens_cpu of rows at slots int32 (bs,)."""
        return self._lens[slots]

    def _grant(self, grant: EncoderGrant) -> None:
        own_slot = np.array([grant.slot], dtype=np.int64)
        slot, pages = upload([own_slot, grant.pages], self._device)
        indices = (pages.unsqueeze(1) * self._page_size + self._page_offsets).view(-1)
        self._table.write(slot, 0, indices, self._account)
        self._lens[grant.slot] = grant.num_tokens
        if grant.source is None:
            return
        cache_locs = indices[: grant.num_tokens].long()
        for layer_id, k, v in self._encoder.encode(grant.source):
            self._pool.set_kv_buffer(layer_id, cache_locs, k, v)


def encoder_table_width(config: AttentionConfig) -> int:
    """Columns of the encoder's table: whole pages. 0 where there is no encoder."""
    return -(-config.max_encoder_tokens // config.page_size) * config.page_size


def encoder_stages(
    encoder: RequestEncoder | None,
    config: AttentionConfig,
    req_to_token_pool: ReqToTokenPool,
    token_to_kv_pool: TokenToKVPool,
) -> tuple[EncoderStage, ...]:
    """encoder: the model's. One stage where there is one."""
    if encoder is None:
        return ()
    return (EncoderStage(encoder, config.encoder_account, req_to_token_pool, token_to_kv_pool),)
