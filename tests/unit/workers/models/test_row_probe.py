"""What a model may do with its cache to be run row by row, and what is refused."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from workers.errors import ModelLoadError
from workers.models.transformers_row_body import RowBody
from workers.models.transformers_row_cache import CachePlace, RowCache
from workers.models.transformers_row_probe import (
    KeptInMemory,
    RowFacts,
    probe_rows,
    random_rows,
)

WIDTH, NUM_HEADS, VOCAB_SIZE = 16, 2, 64
HEADS = (NUM_HEADS, WIDTH // NUM_HEADS)


class Body(nn.Module):
    """One layer of causal attention over learned positions, with K and V in its cache."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(VOCAB_SIZE, WIDTH)
        self.places = nn.Embedding(64, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.window = 64

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        past_key_values: Any = None,
        position_ids: torch.Tensor | None = None,
        use_cache: bool = False,
        return_dict: bool = True,
    ) -> SimpleNamespace:
        cache = past_key_values
        num_new, num_old = input_ids.shape[1], cache.get_seq_length() if cache else 0
        positions = self.positions(input_ids, num_old) if position_ids is None else position_ids
        hidden = self.tokens(input_ids) + self.places(positions)
        q, k, v = (x.unflatten(-1, HEADS).transpose(1, 2) for x in self.qkv(hidden).chunk(3, -1))
        if cache is not None:
            k, v = self.keep(cache, k, v)
        age = num_old + torch.arange(num_new)[:, None] - torch.arange(k.shape[2])
        sees = (age >= 0) & (age < self.window)
        scores = (q @ k.transpose(-1, -2)).masked_fill(~sees, -torch.inf)
        out = (scores.softmax(-1) @ v).transpose(1, 2).flatten(-2)
        return SimpleNamespace(last_hidden_state=self.last(hidden + out, num_old))

    def positions(self, input_ids: torch.Tensor, num_old: int) -> torch.Tensor:
        return num_old + torch.arange(input_ids.shape[1])

    def keep(self, cache: Any, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        kept: tuple[torch.Tensor, ...] = cache.update(k, v, 0)
        return kept

    def last(self, hidden: torch.Tensor, num_old: int) -> torch.Tensor:
        return hidden


class CountsFromOne(Body):
    def positions(self, input_ids: torch.Tensor, num_old: int) -> torch.Tensor:
        return super().positions(input_ids, num_old) + 1


class ForgetsWhereItIs(Body):
    def positions(self, input_ids: torch.Tensor, num_old: int) -> torch.Tensor:
        return torch.arange(input_ids.shape[1])


class KeepsNothing(Body):
    def keep(self, cache: Any, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return k, v


class KeepsTwice(Body):
    def keep(self, cache: Any, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        super().keep(cache, k, v)
        return super().keep(cache, k, v)


class KeepsSometimes(Body):
    def keep(self, cache: Any, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return super().keep(cache, k, v) if cache.get_seq_length() != 5 else (k, v)


class KeepsUnlikeHeads(Body):
    def keep(self, cache: Any, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return super().keep(cache, k, v[:, :1])


class HasNoAttention(Body):
    def forward(self, *args: Any, past_key_values: Any = None, **kwargs: Any) -> SimpleNamespace:
        return SimpleNamespace(last_hidden_state=self.tokens(kwargs["input_ids"]))


class KeepsAState(Body):
    def keep(self, cache: Any, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        cache.update_conv_state(k, 0)
        return super().keep(cache, k, v)


class KeepsAPrompt(Body):
    """Of its own, before the text."""

    def keep(self, cache: Any, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return super().keep(cache, torch.cat((k[:, :, :1], k), 2), torch.cat((v[:, :, :1], v), 2))


class RemembersBesideItsCache(Body):
    """The last token's state is added to the next token's."""

    def last(self, hidden: torch.Tensor, num_old: int) -> torch.Tensor:
        before = self.__dict__.get("seen") if num_old else None
        self.__dict__["seen"] = hidden[:, -1:]
        first = torch.zeros_like(hidden[:, :1]) if before is None else torch.zeros_like(before)
        return hidden + torch.cat((first, hidden[:, :-1]), 1)


class LooksAtOtherRows(Body):
    def last(self, hidden: torch.Tensor, num_old: int) -> torch.Tensor:
        return hidden + hidden.mean(0, keepdim=True) * (len(hidden) > 1)


class TakesOneTokenAtATime(Body):
    """With several on top of its cache it forgets the cache, as some modules do."""

    def keep(self, cache: Any, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        num_old = cache.get_seq_length()
        all_k, all_v = super().keep(cache, k, v)
        if num_old and k.shape[2] > 1:
            return torch.zeros_like(all_k), torch.zeros_like(all_v)
        return all_k, all_v


def config_of(**fields: Any) -> SimpleNamespace:
    return SimpleNamespace(vocab_size=VOCAB_SIZE, pad_token_id=0, eos_token_id=2, **fields)


@torch.inference_mode()
def probed(body: nn.Module, config: Any = None) -> RowFacts:
    config = config or config_of()
    return probe_rows(RowBody(body, body), config, random_rows(config, torch.device("cpu")))


def test_a_decoder_keeps_the_heads_that_it_hands_over() -> None:
    facts = probed(Body().eval())
    (place,) = facts.heads
    assert place == CachePlace("heads", 0)
    heads = facts.heads[place]
    assert (heads.tp_k_head_num, heads.head_dim, heads.v_head_dim) == (*HEADS, HEADS[1])
    assert facts.continues_many


def test_some_take_one_token_at_a_time() -> None:
    assert not probed(TakesOneTokenAtATime().eval()).continues_many


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (CountsFromOne, "does not count positions from 0"),
        (ForgetsWhereItIs, "continues from its cache unlike the whole text"),
        (KeepsNothing, "continues from its cache unlike the whole text"),
        (KeepsTwice, "keeps keys and values of layer 0 twice"),
        (KeepsSometimes, "keeps keys and values in some passes only"),
        (HasNoAttention, "keeps nothing in its cache"),
        (KeepsUnlikeHeads, "has unlike numbers of K and V heads in layer 0"),
        (KeepsAState, "keeps more than keys and values in its cache"),
        (KeepsAPrompt, "keeps what is not of its tokens in layer 0"),
        (RemembersBesideItsCache, "continues from its cache unlike the whole text"),
        (LooksAtOtherRows, "has rows of a batch depend on each other"),
        (nn.Identity, "takes no cache"),
    ],
)
def test_what_would_be_served_wrongly_is_refused(body: type[nn.Module], reason: str) -> None:
    with pytest.raises(ModelLoadError, match=f"^{reason}$"):
        probed(body().eval())


class Windowed(Body):
    """Reads its window when it runs, as transformers' masks do."""

    def __init__(self, config: Any) -> None:
        self.config = config
        super().__init__()

    @property
    def window(self) -> int:
        return int(self.config.sliding_window)

    @window.setter
    def window(self, _: int) -> None:
        """Not its own."""


def test_a_window_has_to_show_in_the_models_own_mask() -> None:
    config = config_of(sliding_window=4096)
    assert probed(Windowed(config).eval(), config).continues_many
    assert config.sliding_window == 4096
    with pytest.raises(ModelLoadError, match="mask that does not show its sliding window"):
        probed(Body().eval(), config)
    with pytest.raises(ModelLoadError, match="attends in chunks"):
        probed(Body().eval(), config_of(layer_types=["chunked_attention"]))


def test_probed_tokens_are_ordinary_and_differ_by_row() -> None:
    rows = random_rows(config_of(image_token_id=5), torch.device("cpu"))
    assert not {0, 2, 5} & set(rows.flatten().tolist())
    assert (rows[0] != rows[1]).any()


def test_a_cache_counts_as_transformers_own_does() -> None:
    kept = KeptInMemory(1)
    kept.begin(3)
    cache = RowCache(kept, 0)
    assert (cache.get_seq_length(), cache.get_mask_sizes(3, 0)) == (0, (3, 0))
    cache.update(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4), 0)
    assert cache.get_seq_length(0) == 3
    later = RowCache(kept, 3)
    assert (later.get_seq_length(1), later.get_mask_sizes(2, 1)) == (3, (5, 0))
    assert later.get_max_length() == -1


def test_keys_without_values_are_kept_in_halves() -> None:
    kept = KeptInMemory(1)
    kept.begin(2)
    cache = RowCache(kept, 0)
    latent, indexed = torch.randn(1, 1, 2, 7), torch.randn(1, 2, 6)
    keys, values = cache.update(latent, torch.empty(1, 1, 2, 0), 0)
    assert torch.equal(keys, latent)
    assert values.shape == (1, 1, 2, 0)
    assert torch.equal(cache.update_indexer(indexed, 0), indexed)
    sizes = {place: (h.head_dim, h.v_head_dim) for place, h in kept.heads.items()}
    assert sizes == {CachePlace("heads", 0): (4, 3), CachePlace("indexer", 0): (3, 3)}
