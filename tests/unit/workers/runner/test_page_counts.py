"""Pages by account: windows get what they can use, the rest is for those that keep every token."""

from dataclasses import replace

import pytest
import torch

from attention.config import AttentionConfig, LayerAttentionConfig
from tests.unit.workers.scheduler.driver import make_config
from workers.config import EngineConfig
from workers.errors import ConfigError
from workers.runner.page_counts import pages_by_account
from workers.scheduler.config import BoundedAccount

GIB = 1 << 30
CONTEXT = 131_072
# Gemma 3's pattern: five layers with a window of 1,024 before one that sees everything.
LAYERS = (*(LayerAttentionConfig(sliding_window_size=1024),) * 5, LayerAttentionConfig()) * 8


def attention(layers=LAYERS, has_bounded_accounts=True, page_size=16):
    return AttentionConfig(
        num_layers=len(layers),
        tp_q_head_num=16,
        tp_k_head_num=8,
        head_dim=256,
        v_head_dim=256,
        max_context_len=CONTEXT,
        page_size=page_size,
        dtype=torch.bfloat16,
        kv_dtype=torch.bfloat16,
        device=torch.device("cpu"),
        layers=layers,
        has_bounded_accounts=has_bounded_accounts,
    )


def engine(**changes):
    return EngineConfig(
        model="m", **{"max_running_requests": 8, "max_step_tokens": 2048, **changes}
    )


def used_bytes(config, pages):
    sizes = (config.kv_bytes_of_account(account) for account in range(len(pages)))
    return sum(size * n * config.page_size for size, n in zip(sizes, pages, strict=True))


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_four_times_as_much_context_fits_where_windows_are_kept_apart(page_size) -> None:
    alike = attention(has_bounded_accounts=False, page_size=page_size)
    apart = attention(page_size=page_size)
    (before,) = pages_by_account(engine(), alike, 64 * GIB)
    after, windows = pages_by_account(engine(), apart, 64 * GIB)
    num_requests = [pages * page_size / CONTEXT for pages in (before, after)]
    assert num_requests[0] == pytest.approx(1.33, abs=0.01)
    assert num_requests[1] > 4.2 * num_requests[0]
    assert windows * page_size < 8 * 2 * (1024 + 2 * page_size) + 2 * 2048 + 10 * page_size
    assert used_bytes(apart, (after, windows)) <= 64 * GIB
    assert used_bytes(apart, (after + 1, windows)) > 64 * GIB


def requests_of(config, pages, num_tokens):
    """How many requests of so many tokens, which decode, an account each lets run."""
    seen = (num_tokens, min(num_tokens, 1024 + config.page_size))
    return [
        num * config.page_size / tokens for num, tokens in zip(pages, seen, strict=True) if tokens
    ]


@pytest.mark.parametrize("max_running_requests", [8, 64, 256])
@pytest.mark.parametrize("num_tokens", [256, 1024, 4096, 32_768, CONTEXT])
def test_more_than_half_of_the_requests_fit_that_would_with_the_best_division(
    max_running_requests, num_tokens
) -> None:
    """Gemma 3 12B's layers in what an H200 has beside its weights, pages of 128 as fa3 takes."""
    config, budget = attention(page_size=128), 90 * GIB
    pages = pages_by_account(
        engine(max_running_requests=max_running_requests, max_step_tokens=8192), config, budget
    )
    assert used_bytes(config, pages) <= budget
    per_token = [config.kv_bytes_of_account(account) for account in (0, 1)]
    of_request = num_tokens * per_token[0] + min(num_tokens, 1024) * per_token[1]
    best = min(max_running_requests, budget / of_request)
    fitting = min(max_running_requests, *requests_of(config, pages, num_tokens))
    assert fitting > 0.48 * best, "pages are whole"
    before = budget / (sum(per_token) * num_tokens)
    assert num_tokens < 8192 or fitting >= min(max_running_requests, 2.5 * before)


def test_little_memory_is_for_all_accounts_alike() -> None:
    config = attention()
    pages = pages_by_account(engine(max_running_requests=256), config, GIB // 2)
    assert len(set(pages)) == 1
    assert used_bytes(config, pages) <= GIB // 2
    with pytest.raises(ConfigError, match="hold no page of"):
        pages_by_account(engine(), config, 1 << 20)
    with pytest.raises(ConfigError, match=r"take 5 bytes more than gpu_memory_fraction=0\.3"):
        pages_by_account(engine(gpu_memory_fraction=0.3), config, -8, state_bytes=3)


def test_no_more_pages_than_all_slots_can_use() -> None:
    assert pages_by_account(engine(max_running_requests=1), attention(), 1 << 50)[0] == 8193


def test_where_no_layer_keeps_every_token_account_0_only_counts() -> None:
    config = attention(LAYERS[:5])
    assert config.kv_bytes_of_account(0) == 0
    counted, windows = pages_by_account(engine(), config, 64 * GIB)
    assert counted > 8192, "a request of the longest context"
    assert used_bytes(config, (counted, windows)) <= 64 * GIB


def test_a_window_as_long_as_the_context_needs_no_account() -> None:
    wide = replace(attention(), max_context_len=1024)
    assert wide.bounded_retentions == ()
    assert len(pages_by_account(engine(), wide, 64 * GIB)) == 1


def test_a_number_of_pages_that_was_asked_for_is_account_0s_and_the_most_of_any() -> None:
    assert pages_by_account(engine(num_pages=70), attention(), 0) == (71, 71)
    windows = 8 * (2 * 65 + 1) + 2 * 128 + 1
    assert pages_by_account(engine(num_pages=7000), attention(), 0) == (7001, windows)


@pytest.mark.parametrize(
    ("window", "context_len", "num_slots", "page_size", "budget_bytes"),
    [
        (3000, 4096, 1, 16, 16 * GIB),
        (4095, 4096, 2, 256, 16 * GIB),
        (512, 1024, 1, 256, 16 * GIB),
        (100, 128, 1, 16, 16 * GIB),
        (4096, 32_768, 256, 16, GIB // 2),
        (1024, 32_768, 256, 16, GIB // 8),
    ],
)
def test_what_one_account_had_room_for_starts(
    window, context_len, num_slots, page_size, budget_bytes
) -> None:
    layers = (LayerAttentionConfig(sliding_window_size=window), LayerAttentionConfig()) * 2
    config = replace(attention(layers, page_size=page_size), max_context_len=context_len)
    pages = pages_by_account(engine(max_running_requests=num_slots), config, budget_bytes)
    (before,) = pages_by_account(
        engine(max_running_requests=num_slots),
        replace(config, has_bounded_accounts=False),
        budget_bytes,
    )
    assert pages[0] >= before
    bounded = tuple(map(BoundedAccount, config.bounded_retentions, pages[1:]))
    make_config(
        page_size=page_size,
        num_pages=pages[0],
        max_context_len=context_len,
        max_running_requests=num_slots,
        bounded=bounded,
    )
