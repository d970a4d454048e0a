"""Drafts that two ranks make, as on GPUs, each with its part of the drafter: the same on both."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fakes.eagle_heads import HeadOracle, save_head
from tests.fakes.rank_drafts import EagerRank, ReplayingRank
from tests.fakes.thread_engine import engine_of_two
from tests.fakes.thread_ranks import ThreadRank, ThreadRanks
from tests.fakes.tiny_models import LATENT, MIXTURES, TinyModel, eager_reference, save_tiny_model
from tests.unit.workers.engine.test_drafts_under_grammars import (
    check_grammars,
    results_under_grammars,
)
from tests.unit.workers.engine.test_eagle import DEEP, DRAFT_IDS
from tests.unit.workers.engine.test_mtp import Oracle, save_target
from tests.unit.workers.engine.test_rank_drafts import (
    DRAFT,
    FEW_PAGES,
    check_replays,
    config_of,
    recorded_run,
)
from tests.unit.workers.engine.test_speculation import assert_same, few_requests
from workers.engine.results import GenerateResult
from workers.layers.embedding import VocabShard, likeliest_tokens
from workers.speculation.draft_mailbox import SentDrafts

Rank = EagerRank | ReplayingRank
Saved = tuple[Path, str, HeadOracle | Oracle]
RANKS = pytest.mark.parametrize(
    "rank_class", [pytest.param(EagerRank, marks=pytest.mark.nightly), ReplayingRank]
)


class MadeDrafts:
    """What each of two ranks has put into its mailbox, step by step."""

    def __init__(self, ranks: list[Rank]) -> None:
        self._made: list[list[tuple[int, list[list[int]]]]] = [[], []]
        for rank, own in zip(ranks, self._made, strict=True):
            rank._mailbox.put = self._recording(rank._mailbox.put, own)

    @staticmethod
    def _recording(put: Callable[..., None], own: list[Any]) -> Callable[..., None]:
        def recorded(step_id: int, slots: Any, sent: SentDrafts) -> None:
            own.append((step_id, sent.drafts.token_ids.tolist()))
            put(step_id, slots, sent)

        return recorded

    def check(self) -> None:
        first, second = self._made
        assert first == second
        assert len(first) > 10


def two_ranks(rank_class: type[Rank], **settings: Any) -> Any:
    config = config_of(tp_size=2, **settings)
    return engine_of_two(config, lambda tp: rank_class(config, tp))


@pytest.mark.parametrize(
    ("rank_class", "settings"),
    [
        pytest.param(EagerRank, {"page_size": 4, "max_step_tokens": 24}, marks=pytest.mark.nightly),
        (ReplayingRank, {"page_size": 1, "num_pages": 110, "max_running_requests": 6}),
    ],
    ids=["chunked", "replayed_and_retracted"],
)
def test_texts_are_those_of_one_rank_without_drafts(
    plain: list[GenerateResult], rank_class: type[Rank], settings: dict[str, Any]
) -> None:
    """Drawn ones, penalties and log probabilities among them."""
    with two_ranks(rank_class, **DRAFT, **settings) as (engine, ranks):
        made = MadeDrafts(ranks)
        assert_same(engine.generate(*few_requests()), plain)
        stats = engine.stats()
    made.check()
    for rank in ranks:
        check_replays(rank)
    assert 0 < stats.num_accepted_draft_tokens < stats.num_draft_tokens


def test_masks_of_both_ranks_are_made_behind_their_drafts() -> None:
    with two_ranks(ReplayingRank, **DRAFT, max_running_requests=7) as (engine, ranks):
        made = MadeDrafts(ranks)
        check_grammars(results_under_grammars(engine))
        assert engine.stats().num_accepted_draft_tokens > 0
    made.check()


def save_eagle(folder: Path) -> Saved:
    target = save_tiny_model(DEEP, folder / "target")
    own = json.loads((target / "config.json").read_text())
    head = save_head(folder / "head", own, DRAFT_IDS)
    return target, f"eagle3:{head}", HeadOracle(head, eager_reference(target))


def save_mtp(tiny: TinyModel, folder: Path) -> Saved:
    return folder, "mtp", Oracle(folder, save_target(tiny, folder))


@pytest.mark.parametrize(
    ("save", "rank_class"),
    [
        pytest.param(save_eagle, EagerRank, marks=pytest.mark.nightly),
        (save_eagle, ReplayingRank),
        (lambda folder: save_mtp(LATENT["deepseek_v3"], folder), EagerRank),
        (lambda folder: save_mtp(MIXTURES["glm4_moe"], folder), ReplayingRank),
    ],
    ids=["eagle", "eagle_replayed", "latents", "mixture_replayed"],
)
def test_drafts_of_heads_are_the_published_ones(
    save: Callable[[Path], Saved], rank_class: type[Rank], tmp_path: Path
) -> None:
    target, speculative, oracle = save(tmp_path)
    settings = {"model": str(target), "speculative": speculative, **FEW_PAGES}
    with two_ranks(rank_class, **settings) as (engine, ranks):
        made = MadeDrafts(ranks)
        asked, stats = recorded_run(ranks[0], engine)
    made.check()
    check_replays(ranks[1])
    assert [one.drafts for one in asked[::3]] == [
        oracle.drafts(one.token_ids, len(one.drafts)) for one in asked[::3]
    ]
    assert stats.num_accepted_draft_tokens > 10


class SkewedRank(ThreadRank):
    """Whose sums are a little larger the higher its rank, as no group's should be."""

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return super().all_reduce(tensor) * (1 + 0.02 * self.rank)


@RANKS
def test_ranks_draft_the_same_where_their_states_are_not(rank_class: type[Rank]) -> None:
    config = config_of(tp_size=2, **DRAFT)
    engines = engine_of_two(config, lambda tp: rank_class(config, tp), SkewedRank)
    with engines as (engine, ranks):
        made = MadeDrafts(ranks)
        engine.generate(*few_requests())
    made.check()


@pytest.mark.parametrize("vocab_size", [7, 3], ids=["padded", "nobody's"])
def test_the_likeliest_of_all_ranks_parts_is_that_of_the_whole(vocab_size: int) -> None:
    """Equals and NaN among them; of four ranks, where some have no token at all."""
    logits = torch.randint(-3, 3, (40, vocab_size), generator=torch.Generator().manual_seed(3))
    whole = logits.to(torch.bfloat16)
    whole[5, 2] = float("nan")
    whole[6] = float("-inf")

    def likeliest(tp: ThreadRank) -> list[int]:
        rows = VocabShard.of_rank(vocab_size, tp)
        local = torch.full((40, rows.num_rows), 9.0, dtype=torch.bfloat16)  # what pads is larger
        end = rows.first_row + rows.num_real_rows
        local[:, : rows.num_real_rows] = whole[:, rows.first_row : end]
        return likeliest_tokens(local, rows, tp).tolist()

    found = ThreadRanks(4).run(likeliest)
    assert found == [whole.argmax(-1).tolist()] * 4
