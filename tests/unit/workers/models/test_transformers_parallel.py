"""Which models of transformers run on several ranks, and what a rank reads of them."""

from pathlib import Path

import pytest
import torch
import transformers.modeling_utils
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import Gemma2Config
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    MergeModulelist,
    Transpose,
    WeightConverter,
)

from tests.fakes.thread_ranks import ThreadRank, ThreadRanks
from tests.fakes.tiny_models import (
    GEMMA,
    MIXTURES,
    THROUGH_TRANSFORMERS,
    TinyModel,
    save_tiny_model,
    tiny_config,
)
from tests.fakes.tiny_reference import build_reference, config_of
from tests.fakes.tiny_state_models import STATE_MODELS
from tests.unit.workers.models.test_transformers_experts import experts_of
from workers.config import EngineConfig
from workers.errors import ConfigError, ModelLoadError
from workers.layers.routed_experts import routed_in_torch
from workers.layers.sharding import ShardContext
from workers.loading.loader import check_servable, load_model
from workers.loading.model_folder import read_hf_config
from workers.models.transformers_cuts import Cut
from workers.models.transformers_experts import fuse_experts
from workers.models.transformers_model import load_transformers_model, random_transformers_model
from workers.models.transformers_parallel import gives_shares
from workers.parallel.group import SingleRank

CPU = torch.device("cpu")
NEMOTRON = STATE_MODELS["nemotron_h"][1]


def shards(size: int) -> list[ShardContext]:
    ranks = ThreadRanks(size)
    return [ShardContext(ThreadRank(ranks, rank), torch.float32, CPU) for rank in range(size)]


def joined(ranks: list[torch.Tensor], whole: torch.Tensor, num_parts: int) -> torch.Tensor:
    """What the ranks have of a tensor: all of it each, or rows or columns of each of its parts."""
    uneven = [dim for dim in range(whole.dim()) if ranks[0].shape[dim] != whole.shape[dim]]
    if not uneven:
        return ranks[-1]
    parts = zip(*(rank.chunk(num_parts, uneven[0]) for rank in ranks), strict=True)
    return torch.cat([shares for part in parts for shares in part], uneven[0])


def check_shares(ranks: list[dict[str, torch.Tensor]], one: dict[str, torch.Tensor]) -> None:
    for key, whole in one.items():
        num_parts = 2 if "gate_up" in key else 1
        assert torch.equal(joined([rank[key] for rank in ranks], whole, num_parts), whole), key
    assert any(ranks[0][key].numel() < whole.numel() for key, whole in one.items())


@pytest.mark.parametrize("name", ["gemma2", "mixtral"])
def test_ranks_have_the_checkpoint_between_them(name: str, tmp_path: Path) -> None:
    folder = save_tiny_model({**GEMMA, **MIXTURES}[name], tmp_path)
    one, *two = (
        load_transformers_model(folder, read_hf_config(folder), shard).state_dict()
        for shard in shards(1) + shards(2)
    )
    check_shares(two, one)


class CountingFile:
    """A safetensors file that counts the elements that are read of each tensor."""

    read: dict[str, int] = {}

    def __init__(self, *arguments, **options) -> None:
        self._file = safe_open(*arguments, **options)

    def __getattr__(self, name):
        return getattr(self._file, name)

    def __exit__(self, *error):
        self._file.__exit__(*error)

    def get_slice(self, key):
        return CountingSlice(key, self._file.get_slice(key))


class CountingSlice:
    def __init__(self, key, source) -> None:
        self._key, self._source = key, source

    def get_shape(self):
        return self._source.get_shape()

    def get_dtype(self):
        return self._source.get_dtype()

    def __getitem__(self, index):
        found = self._source[index]
        CountingFile.read[self._key] = CountingFile.read.get(self._key, 0) + found.numel()
        return found


def test_a_rank_reads_its_share_of_what_is_cut_and_no_more(tmp_path: Path, monkeypatch) -> None:
    folder = save_tiny_model(MIXTURES["mixtral"], tmp_path)
    monkeypatch.setattr(transformers.modeling_utils, "safe_open", CountingFile)
    monkeypatch.setattr(CountingFile, "read", {})
    load_transformers_model(folder, read_hf_config(folder), shards(2)[1])
    whole = load_file(folder / "model.safetensors")
    assert set(CountingFile.read) == set(whole)
    for key, num_read in CountingFile.read.items():
        is_replicated = "norm" in key or ".gate." in key
        vocabulary = whole[key].shape[0] == 131
        share = 131 // 2 / 131 if vocabulary else 1 if is_replicated else 0.5
        assert num_read == round(whole[key].numel() * share), key


def test_noise_is_a_share_of_the_noise_of_one_rank(tmp_path: Path) -> None:
    config = read_hf_config(save_tiny_model(GEMMA["gemma2"], tmp_path))
    one, *two = (
        random_transformers_model(config, shard, 7).state_dict() for shard in shards(1) + shards(2)
    )
    check_shares(two, one)


REFUSED = {
    "no plan": (TinyModel("opt", {"word_embed_proj_dim": 64, "ffn_dim": 96}), 2, "no tensor-"),
    "plan of the head alone": (TinyModel("diffllama"), 2, "no layer"),
    "heads": (GEMMA["gemma2"], 4, "num_key_value_heads=2; set tp_size=1 in place"),
    "features": (
        TinyModel("mixtral", {"intermediate_size": 97, "num_local_experts": 2}),
        2,
        r"experts\.gate_up_proj has 194 features",
    ),
}


@pytest.mark.parametrize(("tiny", "size", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_cut_is_refused_before_weights_are_read(
    tiny: TinyModel, size: int, reason: str, tmp_path: Path
) -> None:
    """And before they are copied."""
    folder, cache = save_tiny_model(tiny, tmp_path / "model"), tmp_path / "cache"
    (folder / "model.safetensors").write_bytes(b"nothing to be read")
    config = EngineConfig(
        model=str(folder),
        tp_size=size,
        weights_cache_dir=str(cache),
        model_impl="transformers",
    )
    for attempt in (
        lambda: check_servable(config),
        lambda: load_model(config, shards(size)[0].tp, CPU, torch.float32),
    ):
        with pytest.raises(ConfigError, match=reason):
            attempt()
    assert not cache.exists()


def test_a_style_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    """Of Llama 4's experts, whose two matrices lie side by side."""
    folder = tmp_path / "llama4"
    config_of("llama4_text", "Llama4ForCausalLM", {}).save_pretrained(folder)
    with pytest.raises(ConfigError, match=r"plan asks for packed_rowwise; set tp_size=1"):
        check_servable(EngineConfig(model=str(folder), tp_size=2, model_impl="transformers"))


def test_features_that_are_compared_with_each_other_cannot_be_cut(tmp_path: Path) -> None:
    config_of("gemma3n_text", "Gemma3nForCausalLM", {}).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"sparse activations compare all features"):
        check_servable(EngineConfig(model=str(tmp_path), tp_size=2))


def test_one_parameter_is_cut_in_one_way(tmp_path: Path, monkeypatch) -> None:
    """transformers adds a rule for embeddings, which plans may overrule; the head has its own."""
    plan = {**Gemma2Config.base_model_tp_plan, "embed_tokens": "replicate"}
    monkeypatch.setattr(Gemma2Config, "base_model_tp_plan", plan)
    tied = {**GEMMA["gemma2"].changes, "tie_word_embeddings": True}
    config = tiny_config(TinyModel("gemma2", tied))
    config.architectures = ["Gemma2ForCausalLM"]
    config.save_pretrained(tmp_path)
    check_servable(EngineConfig(model=str(tmp_path), model_impl="transformers"))
    with pytest.raises(ConfigError, match=r"embed_tokens.weight and lm_head.weight, which are one"):
        check_servable(EngineConfig(model=str(tmp_path), tp_size=2, model_impl="transformers"))


CONVERSIONS = {
    "experts stacked": ([MergeModulelist(dim=0)], ["a"], Cut(2), True),
    "experts stacked and cut between them": ([MergeModulelist(dim=0)], ["a"], Cut(0), False),
    "parts joined": ([Concatenate(dim=1)], ["a", "b"], Cut(1, num_parts=2), True),
    "parts joined beside the cut": ([Concatenate(dim=0)], ["a", "b"], Cut(1), True),
    "joined and cut as one": ([Concatenate(dim=0)], ["a", "b", "c"], Cut(0), False),
    "taken apart": ([Chunk(dim=0)], ["a"], Cut(0), False),
    "turned": ([Transpose(1, 2)], ["a"], Cut(2), False),
}


@pytest.mark.parametrize(
    ("operations", "sources", "cut", "is_right"), CONVERSIONS.values(), ids=CONVERSIONS
)
def test_which_conversions_of_shares_give_shares(operations, sources, cut, is_right) -> None:
    assert gives_shares(WeightConverter(sources, ["x"], operations), cut) is is_right


def test_gpus_take_several_ranks_where_these_join_logits(tmp_path: Path) -> None:
    folder = save_tiny_model(THROUGH_TRANSFORMERS["olmo2"], tmp_path)
    check_servable(EngineConfig(model=str(folder), tp_size=2, device="cuda"))


def test_gpus_take_one_rank_where_the_plan_leaves_the_head_whole(tmp_path: Path) -> None:
    """Nemotron-H's."""
    config_of("nemotron_h", "NemotronHForCausalLM", NEMOTRON).save_pretrained(tmp_path)
    check_servable(EngineConfig(model=str(tmp_path), tp_size=2, device="cpu"))
    with pytest.raises(ConfigError, match=r"CPU only: its plan leaves the head whole.*tp_size=1"):
        check_servable(EngineConfig(model=str(tmp_path), tp_size=2, device="cuda"))


@torch.inference_mode()
def test_experts_of_ranks_run_as_our_products_and_add_up_to_the_whole_ones(tmp_path: Path) -> None:
    config = read_hf_config(save_tiny_model(MIXTURES["mixtral"], tmp_path))
    ranks = ThreadRanks(2)
    groups = SingleRank(), ThreadRank(ranks, 0), ThreadRank(ranks, 1)
    of = [ShardContext(tp, torch.bfloat16, CPU) for tp in groups]
    one, *two = (random_transformers_model(config, shard, 7).model for shard in of)
    hidden = torch.randn(9, config.hidden_size, dtype=torch.bfloat16)
    ids, shares = torch.tensor([[0, 1], [1, 0], [1, 0]] * 3), torch.rand(9, 2).bfloat16()
    wanted = [module(hidden, ids, shares) for module in experts_of(one)]

    def given(tp: ThreadRank) -> list[torch.Tensor]:
        body = two[tp.rank]
        assert fuse_experts(body, routed_in_torch) == len(wanted) > 0
        return [module(hidden, ids, shares) for module in experts_of(body)]

    for found in ranks.run(given):
        for ours, whole in zip(found, wanted, strict=True):
            assert (ours - whole).float().norm() < 0.02 * whole.float().norm()


def test_tensors_that_are_taken_apart_after_they_were_cut_are_refused(tmp_path: Path) -> None:
    """HRM's checkpoints have gate and up in one, its code has not."""
    name = "HrmTextForCausalLM"
    build_reference(config_of("hrm_text", name, {}), name, tmp_path)
    with pytest.raises(ModelLoadError, match="cannot be cut over ranks as they are read"):
        load_transformers_model(tmp_path, read_hf_config(tmp_path), shards(2)[0])
