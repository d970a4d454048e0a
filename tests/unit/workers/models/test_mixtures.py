"""Mixtures of experts natively, whole and cut over ranks, against transformers' eager models."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.fakes.model_rows import ModelRows, torch_native_backend
from tests.fakes.thread_ranks import ThreadRanks
from tests.fakes.tiny_models import (
    LATENT,
    MIXTURES,
    NATIVE,
    TinyModel,
    eager_reference,
    random_prompt,
    save_tiny_model,
    tiny_config,
)
from tests.proofs.served import serves
from workers.config import EngineConfig
from workers.errors import ConfigError, ModelLoadError
from workers.loading.loader import load_model
from workers.loading.weight_files import INDEX_FILE
from workers.models.features import ModelFeature
from workers.models.llama_family import native_obstacle
from workers.models.registry import choose_implementation
from workers.parallel.group import SingleRank, TPGroup
from workers.survey.survey import survey_model

CPU = torch.device("cpu")
MAX_LOGIT_ERROR = 1e-4
MAX_DIFFERENCE_OF_RANKS = 2e-5
CUT = ("mixtral", "qwen2_moe", "gpt_oss", "llama4", "deepseek_v2", "deepseek_v3")
"""Of each kind of routing, shared experts and checkpoint one."""
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
}
PROMPT = random_prompt(40)
NUM_TOKENS = 64


def rows_of(
    folder: Path, tp: TPGroup | None = None, implementation: str = "native", **changes: Any
) -> ModelRows:
    config = EngineConfig(model=str(folder), **changes)
    with torch.inference_mode(mode=False):
        loaded = load_model(config, tp or SingleRank(), CPU, torch.float32)
    assert loaded.implementation == (changes.get("model_impl") or implementation)
    return ModelRows(loaded, torch_native_backend(loaded))


def stepwise(rows: ModelRows) -> torch.Tensor:
    """Logits of the prompt, whose last tokens come one by one."""
    steps = [PROMPT[:33], *([token] for token in PROMPT[33:])]
    return torch.cat([rows.step({0: tokens})[0] for tokens in steps])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    models = {**LATENT, **MIXTURES}
    # A limit that the activations of so small a model reach.
    limited = {**MIXTURES["gpt_oss"].changes, "swiglu_limit": 1.5}
    models["gpt_oss"] = TinyModel("gpt_oss", limited)
    return {
        name: save_tiny_model(models[name], tmp_path_factory.mktemp(name))
        for name in {*MIXTURES, *CUT}
    }


@pytest.mark.parametrize("name", MIXTURES)
@serves(ModelFeature.CPU)
def test_logits_and_greedy_tokens_are_those_of_transformers(
    name: str, folders: dict[str, Path]
) -> None:
    """Of all 103 tokens at once, given which every token is the likeliest of the steps."""
    tokens, logits = rows_of(folders[name]).greedy_logits(0, PROMPT, NUM_TOKENS)
    with torch.inference_mode():
        want = eager_reference(folders[name])(torch.tensor([tokens]), use_cache=False).logits[0]
    torch.testing.assert_close(logits, want, rtol=0, atol=MAX_LOGIT_ERROR)
    assert want[len(PROMPT) - 1 : -1].argmax(-1).tolist() == tokens[len(PROMPT) :]


@pytest.mark.parametrize("name", MIXTURES)
def test_transformers_code_can_be_asked_for(name: str, folders: dict[str, Path]) -> None:
    through = rows_of(folders[name], model_impl="transformers")
    torch.testing.assert_close(
        stepwise(through), stepwise(rows_of(folders[name])), rtol=0, atol=MAX_LOGIT_ERROR
    )


@pytest.mark.parametrize("is_sharded", [False, True])
@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "deepseek_v3"])
def test_experts_in_one_tensor_are_left_to_transformers(
    name: str,
    is_sharded: bool,
    folders: dict[str, Path],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As its save_pretrained stores them where it is not to go back to the published names."""
    model = AutoModelForCausalLM.from_pretrained(folders[name])
    size = {"max_shard_size": "100KB"} if is_sharded else {}
    model.save_pretrained(tmp_path, save_original_format=False, **size)
    assert (tmp_path / INDEX_FILE).is_file() == is_sharded
    got = stepwise(rows_of(tmp_path, implementation="transformers"))
    torch.testing.assert_close(got, stepwise(rows_of(folders[name])), rtol=0, atol=MAX_LOGIT_ERROR)
    assert "experts of a layer in one tensor" in caplog.text
    found = survey_model(EngineConfig(model=str(tmp_path), device="cpu"))
    assert found.runs == "transformers"
    assert "experts of a layer in one tensor" in found.reason
    with pytest.raises(ModelLoadError, match="experts of a layer in one tensor"):
        rows_of(tmp_path, model_impl="native")


@pytest.mark.parametrize("name", CUT)
def test_ranks_that_cut_or_divide_the_experts_compute_what_one_does(
    name: str, folders: dict[str, Path]
) -> None:
    want = stepwise(rows_of(folders[name]))
    for size, ep_size in ((2, 1), (2, 2), (4, 2)):
        settings = {"tp_size": size, "ep_size": ep_size}
        outputs = ThreadRanks(size).run(
            lambda tp, settings=settings: stepwise(rows_of(folders[name], tp, **settings))
        )
        for output in outputs:
            assert torch.equal(output, outputs[0])
        torch.testing.assert_close(outputs[0], want, rtol=0, atol=MAX_DIFFERENCE_OF_RANKS)


def test_a_rank_keeps_its_share_alone(folders: dict[str, Path]) -> None:
    def experts_of(tp: TPGroup, ep_size: int) -> list[tuple[int, ...]]:
        config = EngineConfig(model=str(folders["deepseek_v3"]), tp_size=4, ep_size=ep_size)
        with torch.inference_mode(mode=False):
            loaded = load_model(config, tp, CPU, torch.float32)
        return [tuple(p.shape) for name, p in loaded.model.named_parameters() if "gate_up" in name]

    # Eight experts of width 32 and two pieces of shared ones; the first layer is dense.
    assert ThreadRanks(4).run(lambda tp: experts_of(tp, 1)[1]) == [(10, 16, 64)] * 4
    assert ThreadRanks(4).run(lambda tp: experts_of(tp, 2)[1]) == [(5, 32, 64)] * 4
    assert ThreadRanks(4).run(lambda tp: experts_of(tp, 4)[1]) == [
        (3, 64, 64),
        (3, 64, 64),
        (2, 64, 64),
        (2, 64, 64),
    ]


def architecture_of(tiny: TinyModel) -> tuple[Any, str]:
    config = tiny_config(tiny)
    return config, ARCHITECTURES[tiny.model_type]


def test_what_cannot_be_divided_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="ep_size=2 does not divide tp_size=3"):
        EngineConfig(tp_size=3, ep_size=2)
    parts = EngineConfig(model="m", tp_size=2, ep_size=2)
    config, name = architecture_of(NATIVE["llama3"])
    with pytest.raises(ConfigError, match="LlamaForCausalLM has no experts"):
        choose_implementation(config, name, parts, "cpu")
    bridged = EngineConfig(model="m", tp_size=2, ep_size=2, model_impl="transformers")
    config, name = architecture_of(MIXTURES["qwen3_moe"])
    with pytest.raises(ConfigError, match="runs through transformers, without ep_size"):
        choose_implementation(config, name, bridged, "cpu")
    changes = {**MIXTURES["qwen3_moe"].changes, "num_experts": 9}
    folder = save_tiny_model(TinyModel("qwen3_moe", changes), tmp_path)
    with pytest.raises(ConfigError, match="9 experts cannot be divided over ep_size=2"):
        ThreadRanks(2).run(lambda tp: rows_of(folder, tp, tp_size=2, ep_size=2))


def test_shared_experts_of_another_width_go_through_transformers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    changes = {**MIXTURES["qwen2_moe"].changes, "shared_expert_intermediate_size": 40}
    config, name = architecture_of(TinyModel("qwen2_moe", changes))
    assert choose_implementation(config, name, EngineConfig(model="m"), "cpu") == "transformers"
    assert "shared experts of width 40 are no multiple of a routed one's, 32" in caplog.text
    with pytest.raises(ModelLoadError, match="width 40"):
        choose_implementation(config, name, EngineConfig(model="m", model_impl="native"), "cpu")


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("mixtral", {"num_experts_per_tok": 0}, "cannot take 0 of 4 experts"),
        ("qwen3_moe", {"num_experts_per_tok": 9}, "cannot take 9 of 8 experts"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step 0"),
        ("qwen2_moe", {"moe_intermediate_size": 0}, "width 0"),
        ("qwen3_moe", {"num_experts": 0}, "of 0 experts"),
        ("glm4_moe", {"n_group": 3}, "no 3 equal groups"),
        ("glm4_moe", {"n_group": 2, "topk_group": 3}, "3 of 2 groups"),
        ("glm4_moe", {"n_group": 8, "topk_group": 1, "num_experts_per_tok": 2}, "of 1 experts"),
    ],
)
def test_experts_that_cannot_be_chosen_so_are_no_native_model(
    name: str, changes: dict[str, Any], reason: str
) -> None:
    tiny = TinyModel(name, {**MIXTURES[name].changes, **changes})
    obstacle = native_obstacle(tiny_config(tiny))
    assert obstacle is not None
    assert reason in obstacle


def chosen(tiny: TinyModel, device_type: str, is_quantised: bool = False, **changes: Any) -> str:
    config, name = architecture_of(tiny)
    engine = EngineConfig(model="m", **{"dtype": "bfloat16", **changes})
    return choose_implementation(config, name, engine, device_type, is_quantised=is_quantised)


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss"])
def test_one_gpu_runs_natively_what_fused_kernels_cover(name: str) -> None:
    """In 16 bits, windows or not, whatever the config says of its dtype."""
    tiny = MIXTURES[name]
    windows = {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 1}
    windowed = TinyModel(tiny.model_type, {**tiny.changes, **windows})
    for one in (tiny, windowed):
        assert chosen(one, "cuda") == "native"
        assert chosen(one, "cuda", dtype="float16", max_loras=1) == "native"
        assert chosen(one, "cuda", dtype="auto") == "native"
        assert chosen(one, "cuda", model_impl="transformers") == "transformers"


@pytest.mark.parametrize(
    ("name", "changes", "dtype"),
    [
        ("qwen3_moe", {}, "float32"),
        ("qwen3_moe", {"dtype": "float32"}, "auto"),
        ("mixtral", {"head_dim": 12}, "bfloat16"),
        ("glm4_moe", {}, "bfloat16"),
    ],
    ids=["float32", "float32-checkpoint", "heads-of-12", "half-a-head-rotates"],
)
def test_one_gpu_keeps_to_transformers_what_was_not_measured(
    name: str, changes: dict[str, Any], dtype: Any
) -> None:
    tiny = TinyModel(name, {**MIXTURES[name].changes, **changes})
    assert chosen(tiny, "cuda", dtype=dtype) == "transformers"
    assert chosen(tiny, "cuda", dtype=dtype, model_impl="native") == "native"
    assert chosen(tiny, "cuda", dtype=dtype, tp_size=2) == "native"
    assert chosen(tiny, "cuda", dtype=dtype, is_quantised=True) == "native"
    assert chosen(tiny, "cpu", dtype=dtype) == "native"
