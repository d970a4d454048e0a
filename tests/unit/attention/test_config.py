"""What a layer may have of its own, and the layout that follows from it."""

from dataclasses import replace

import pytest
import torch

from attention import AttentionConfig, AttentionHeads, LayerAttentionConfig
from attention.memory.layout import CurrentChunk, EveryToken, HeadsEntry, LastTokens, LatentEntry

PLAIN = LayerAttentionConfig()
WINDOW = LayerAttentionConfig(sliding_window_size=9)
CHUNKS = LayerAttentionConfig(chunk_size=8)
WIDE = AttentionHeads(8, 1, 32, 32)


def config_of(*layers: LayerAttentionConfig) -> AttentionConfig:
    return AttentionConfig(
        num_layers=len(layers),
        tp_q_head_num=8,
        tp_k_head_num=2,
        head_dim=16,
        v_head_dim=12,
        max_context_len=64,
        page_size=4,
        dtype=torch.float32,
        kv_dtype=torch.float32,
        device=torch.device("cpu"),
        layers=layers,
    )


def groups_of(config: AttentionConfig) -> list[tuple[tuple[int, ...], object, object]]:
    return [(one.layer_ids, one.entry, one.retention) for one in config.kv_layout.groups]


def test_a_plain_model_has_one_group() -> None:
    config = config_of(PLAIN, PLAIN)
    assert groups_of(config) == [((0, 1), HeadsEntry(2, 16, 12), EveryToken())]
    assert config.kv_bytes_per_token == 2 * 2 * 28 * 4


def test_layers_are_grouped_by_what_they_keep_and_for_how_long() -> None:
    own = replace(WINDOW, heads=WIDE)
    config = config_of(WINDOW, PLAIN, own, WINDOW, CHUNKS)
    assert groups_of(config) == [
        ((0, 3), HeadsEntry(2, 16, 12), LastTokens(9)),
        ((1,), HeadsEntry(2, 16, 12), EveryToken()),
        ((2,), HeadsEntry(1, 32, 32), LastTokens(9)),
        ((4,), HeadsEntry(2, 16, 12), CurrentChunk(8)),
    ]
    assert [one.retention for one in config.kv_layout.accounts] == [
        EveryToken(),
        LastTokens(9),
        CurrentChunk(8),
    ]
    assert config.kv_bytes_per_token == (4 * 2 * 28 + 64) * 4
    assert config.heads_of(2) == WIDE
    assert config.heads_of(1) == config.heads == AttentionHeads(8, 2, 16, 12)


def test_a_layer_that_reads_another_ones_kv_stands_in_no_group() -> None:
    reader = LayerAttentionConfig(kv_layer_id=0)
    config = config_of(PLAIN, WINDOW, reader, replace(WINDOW, kv_layer_id=0))
    assert [one.layer_ids for one in config.kv_layout.groups] == [(0,), (1,)]
    assert config.kv_bytes_per_token == 2 * 2 * 28 * 4


@pytest.mark.parametrize(
    ("layers", "reason"),
    [
        ((replace(PLAIN, kv_layer_id=0),), "layer 0 cannot read the K and V of layer 0"),
        ((replace(PLAIN, kv_layer_id=1), PLAIN), "layer 0 cannot read the K and V of layer 1"),
        ((PLAIN, replace(PLAIN, kv_layer_id=-1)), "cannot read the K and V of layer -1"),
        (
            (PLAIN, replace(PLAIN, kv_layer_id=0), replace(PLAIN, kv_layer_id=1)),
            "layer 2 cannot read the K and V of layer 1",
        ),
        (
            (PLAIN, replace(PLAIN, kv_layer_id=0, heads=WIDE)),
            "layer 1 has other KV heads than layer 0",
        ),
        ((WINDOW, replace(PLAIN, kv_layer_id=0)), "layer 1 sees tokens that layer 0 does not"),
        ((CHUNKS, replace(WINDOW, kv_layer_id=0)), "layer 1 sees tokens that layer 0 does not"),
    ],
)
def test_what_a_layer_cannot_read_is_refused(
    layers: tuple[LayerAttentionConfig, ...], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        config_of(*layers)


def test_heads_that_do_not_divide_and_windows_in_chunks_are_refused() -> None:
    with pytest.raises(ValueError, match="tp_q_head_num=3 is not a multiple of tp_k_head_num=2"):
        AttentionHeads(3, 2, 16, 16)
    with pytest.raises(ValueError, match="a window or chunks, not both"):
        LayerAttentionConfig(sliding_window_size=4, chunk_size=4)


def test_latents_take_the_place_of_heads_in_every_layer() -> None:
    config = replace(config_of(PLAIN, PLAIN), latent=LatentEntry(512, 64))
    assert groups_of(config) == [((0, 1), LatentEntry(512, 64), EveryToken())]
    assert config.kv_layout.groups[0].name == "every_latent_512+64"
    assert config.kv_bytes_per_token == 2 * 576 * 4
    assert config.keeps_one_entry


@pytest.mark.parametrize("odd", [WINDOW, CHUNKS, replace(PLAIN, heads=WIDE)])
def test_layers_that_keep_latents_are_all_alike(odd: LayerAttentionConfig) -> None:
    with pytest.raises(ValueError, match="keep latents see every token"):
        replace(config_of(PLAIN, odd), latent=LatentEntry(512, 64))
