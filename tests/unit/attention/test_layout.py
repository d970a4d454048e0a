"""What a model declares to keep: groups, accounts and the first position still visible."""

import pytest

from attention.memory.layout import (
    CacheGroup,
    CurrentChunk,
    EveryToken,
    HeadsEntry,
    KVLayout,
    LastTokens,
    LatentEntry,
)

HEADS = HeadsEntry(num_heads=2, head_dim=8, v_head_dim=4)
ALL = EveryToken()


def group(name, layer_ids, retention=ALL, entry=HEADS):
    return CacheGroup(name, layer_ids, entry, retention)


def test_groups_of_one_retention_share_an_account_and_every_token_comes_first() -> None:
    layout = KVLayout(
        (
            group("sliding", (0, 1), LastTokens(4)),
            group("full", (2,)),
            group("latent", (3,), entry=LatentEntry(16, 4)),
            group("narrow", (4,), LastTokens(4), HeadsEntry(1, 2, 2)),
        )
    )
    full, window = layout.accounts
    assert full.retention == EveryToken()
    assert [one.name for one in full.groups] == ["full", "latent"]
    assert [one.name for one in window.groups] == ["sliding", "narrow"]
    assert [one.elements_per_token for one in full.groups] == [24, 20]
    assert [one.elements_per_token for one in window.groups] == [48, 4]


def test_a_plain_model_has_one_account() -> None:
    assert len(KVLayout((group("all", (0, 1, 2)),)).accounts) == 1


@pytest.mark.parametrize(
    ("retention", "visible"),
    [
        (EveryToken(), [0] * 9),
        (LastTokens(1), list(range(9))),
        (LastTokens(3), [0, 0, 0, 1, 2, 3, 4, 5, 6]),
        (CurrentChunk(4), [0, 0, 0, 0, 4, 4, 4, 4, 8]),
    ],
)
def test_the_first_position_that_is_still_visible(retention, visible) -> None:
    found = [retention.first_visible(position) for position in range(9)]
    assert found == visible
    assert found == sorted(found)


def test_what_declares_nothing_or_something_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one group"):
        KVLayout(())
    with pytest.raises(ValueError, match="layer 1 stands in the layout twice"):
        KVLayout((group("one", (0, 1)), group("other", (1,))))
    with pytest.raises(ValueError, match="group 'one' stands in the layout twice"):
        KVLayout((group("one", (0,)), group("one", (1,))))
    with pytest.raises(ValueError, match="ascending layers"):
        group("one", (1, 0))
    with pytest.raises(ValueError, match="ascending layers"):
        group("one", ())
    for kind in (LastTokens, CurrentChunk):
        with pytest.raises(ValueError, match="at least one token, got 0"):
            kind(0)
