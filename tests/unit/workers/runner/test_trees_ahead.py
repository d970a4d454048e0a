"""Trees made before the host has read the samples: the same trees, and the same text."""

from typing import Any

import pytest

from tests.fakes.compared_drafts import ComparedDrafts
from tests.fakes.launching_rank import LaunchingRank
from tests.fakes.rank_drafts import ReplayingTreeRank
from tests.unit.workers.runner.test_drafts_ahead import (
    DRAFT,
    HEAD,
    check_pretended,
    config_of,
    texts_of,
)
from workers.config import EngineConfig
from workers.engine.engine import Engine

TREE = (3, 2, 2)


class LaunchingTreeRank(ReplayingTreeRank, LaunchingRank):
    """Its drafts are trees."""


def drafting(speculative: str, **settings: Any) -> EngineConfig:
    own = {"speculative": speculative, "draft_policy": "fixed", "draft_tree": TREE}
    return config_of(**own, **settings)


@pytest.fixture(scope="module")
def plain_texts() -> dict[str, list[int]]:
    return texts_of(Engine.from_config(config_of()))


# What a draft model shows of chains, a head shows of trees; both are shown every night.
@pytest.mark.parametrize("speculative", [HEAD, pytest.param(DRAFT, marks=pytest.mark.nightly)])
def test_trees_and_texts_are_those_of_known_lengths(
    speculative: str, plain_texts: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over rows that come and go, draw and count; narrower trees near their ends among them."""
    rank = LaunchingTreeRank(drafting(speculative, page_size=8), monkeypatch)
    compared = ComparedDrafts(rank, monkeypatch)
    assert texts_of(rank.engine()) == plain_texts
    assert compared.num_equal > 5


def test_pretended_paths_are_as_long_on_the_device_as_on_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No row has more tokens than its tree has depths, and one."""
    check_pretended(LaunchingTreeRank(drafting(HEAD), monkeypatch), 0.9)
