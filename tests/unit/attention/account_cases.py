"""Steps whose layer keeps its tokens in an account of its own, from cases.py's steps."""

from __future__ import annotations

from dataclasses import replace

import torch

from attention.memory.grouped_kv_pool import GroupedTokenToKVPool
from attention.memory.req_to_token_pool import ReqToTokenPool
from attention.memory.token_to_kv_pool import MHATokenToKVPool
from tests.unit.attention.cases import AttentionCase, CaseSpec, build_case


def windowed(rows, layer, page_size) -> AttentionCase:
    half = torch.bfloat16
    return build_case(CaseSpec(rows, page_size, dtype=half, kv_dtype=half, layer=layer))


def with_account(case: AttentionCase) -> AttentionCase:
    """The layer's tokens in account 1, without the pages that no new token sees; account 0 has no
    bytes, and what says where its tokens are is wrong."""
    config = replace(case.config, has_bounded_accounts=True)
    num_pages, page_size = case.token_to_kv_pool.num_pages, case.spec.page_size
    pool = GroupedTokenToKVPool(config, (num_pages, num_pages), MHATokenToKVPool)
    for own, kept in zip(
        pool.get_kv_buffer(0), case.token_to_kv_pool.get_kv_buffer(0), strict=True
    ):
        own.copy_(kept)
    (retention,) = config.bounded_retentions
    old = case.req_to_token_pool
    table = ReqToTokenPool(old.max_running_requests, old.max_context_len, case.q.device, 2)
    table.req_to_token.fill_(num_pages * page_size - 1)
    table.tables[1].copy_(old.req_to_token)
    slots = case.batch.req_pool_indices.tolist()
    for slot, row in zip(slots, case.spec.rows, strict=True):
        first_seen = retention.first_visible(row.prefix_len) // page_size
        gone = table.tables[1][slot, : first_seen * page_size : page_size].long() // page_size
        for buffer in pool.get_kv_buffer(0):
            buffer[gone] = torch.nan
            buffer[0] = 1.0  # the dummy page holds numbers
    places = case.batch.out_cache_loc
    batch = replace(
        case.batch, out_cache_loc=torch.zeros_like(places), bounded_cache_locs=(places,)
    )
    return replace(case, config=config, req_to_token_pool=table, token_to_kv_pool=pool, batch=batch)
