"""Which models run row by row, which calls a step makes of its rows, and what is refused there."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig

from tests.fakes.dense_attention import DenseAttention
from tests.fakes.model_rows import ModelRows, make_batch, torch_native_backend
from tests.fakes.tiny_reference import build_reference, config_of, random_prompt, reference_logits
from workers.config import EngineConfig
from workers.engine.engine import Engine
from workers.errors import ConfigError, ModelLoadError
from workers.layers.sharding import ShardContext
from workers.loading.loader import LoadedModel, load_model
from workers.models import transformers_row_model
from workers.models.transformers_bridge import bridged
from workers.models.transformers_model import TransformersCausalLM, random_transformers_model
from workers.models.transformers_parts import BodyAndHead
from workers.models.transformers_row_model import RowByRowCausalLM, calls_of
from workers.parallel.group import SingleRank

CPU = torch.device("cpu")


def load(folder: Path, **changes: Any) -> LoadedModel:
    return load_model(EngineConfig(model=str(folder), **changes), SingleRank(), CPU, torch.float32)


def random_model(model_type: str, class_name: str, **changes: Any) -> Any:
    config = config_of(model_type, class_name, changes)
    return random_transformers_model(config, ShardContext(SingleRank(), torch.float32, CPU), 0)


@pytest.fixture(scope="module")
def bart(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("bart")
    config = config_of("bart", "BartForCausalLM", {})
    return folder, build_reference(config, "BartForCausalLM", folder)


@pytest.mark.parametrize("continues_many", [True, False])
def test_rows_of_any_length_come_out_as_in_one_pass(
    bart: tuple[Path, Any], continues_many: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, reference = bart
    loaded = load(folder)
    monkeypatch.setattr(loaded.model, "_continues_many", continues_many)
    rows = ModelRows(loaded, torch_native_backend(loaded))
    texts = {row: random_prompt(20 + row) for row in range(3)}
    got: dict[int, list[torch.Tensor]] = {row: [] for row in texts}
    starts = dict.fromkeys(texts, 0)
    for lengths in ({0: 7, 1: 7}, {2: 5, 0: 1, 1: 1}, {0: 6, 1: 6, 2: 9}, {1: 7, 2: 8, 0: 6}):
        new = {row: texts[row][starts[row] : starts[row] + n] for row, n in lengths.items()}
        for row, logits in rows.step(new).items():
            got[row].append(logits)
            starts[row] += len(new[row])
    for row, text in texts.items():
        torch.testing.assert_close(
            torch.cat(got[row]), reference_logits(reference, text), atol=1e-4, rtol=1e-4
        )


def calls(new: dict[int, int], prefix: dict[int, int], continues_many: bool = True) -> list[Any]:
    batch = make_batch({row: [0] * n for row, n in new.items()}, prefix, DenseAttention())
    return [
        (call.tokens.tolist(), call.slots.tolist(), call.kind)
        for call in calls_of(batch, continues_many)
    ]


def test_rows_of_equal_length_and_prefix_share_a_call() -> None:
    new, prefix = {4: 1, 1: 2, 0: 1, 2: 1}, {4: 9, 1: 0, 0: 9, 2: 3}
    assert calls(new, prefix) == [([[0], [3]], [4, 0], 9), ([[1, 2]], [1], 0), ([[4]], [2], 3)]


def test_calls_gather_no_more_than_their_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers_row_model, "MAX_GATHERED_TOKENS", 25)
    same = dict.fromkeys(range(3), 1), dict.fromkeys(range(3), 9)
    assert [slots for _, slots, _ in calls(*same)] == [[0, 1], [2]]
    longer = dict.fromkeys(range(2), 1), dict.fromkeys(range(2), 40)
    assert [slots for _, slots, _ in calls(*longer)] == [[0], [1]]


def test_tokens_go_one_by_one_where_a_model_takes_no_more() -> None:
    new, prefix = {0: 2, 1: 2}, {0: 0, 1: 5}
    assert calls(new, prefix, continues_many=False) == [
        ([[0, 1]], [0], 0),
        ([[2]], [1], 5),
        ([[3]], [1], 6),
    ]


def test_a_model_that_makes_use_of_the_interface_is_one_flat_batch(
    caplog: pytest.LogCaptureFixture,
) -> None:
    # Attention of StableLM gets none of its model's keyword arguments.
    for model_type, name in (("stablelm", "StableLmForCausalLM"), ("biogpt", "BioGptForCausalLM")):
        assert isinstance(bridged(random_model(model_type, name), 64), TransformersCausalLM)
    assert "row by row" not in caplog.text


def test_a_flat_batch_is_refused_where_a_model_asks_more_of_attention() -> None:
    """Doge masks keys by a learned score: without that mask its text would be wrong, not absent."""
    with pytest.raises(ModelLoadError, match="DogeAttention asks attention for attention_mask"):
        TransformersCausalLM(BodyAndHead.of(random_model("doge", "DogeForCausalLM")))
    nemotron = random_model("nemotron", "NemotronForCausalLM")
    for layer in nemotron.model.layers:
        del layer.self_attn.layer_idx
    with pytest.raises(ModelLoadError, match="NemotronAttention does not get its model's keyword"):
        TransformersCausalLM(BodyAndHead.of(nemotron))


def test_a_model_whose_attention_has_no_place_for_another_runs_row_by_row(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = bridged(random_model("gptj", "GPTJForCausalLM"), 64)
    assert isinstance(model, RowByRowCausalLM)
    assert "GPTJForCausalLM computes attention in transformers' own code, row by row" in caplog.text


def test_a_class_that_lacks_another_key_is_built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    built = []

    def build(*_: Any, **__: Any) -> None:
        built.append(1)
        raise KeyError("rope")

    monkeypatch.setattr(transformers.GPTJForCausalLM, "_from_config", build)
    with pytest.raises(KeyError, match="rope"):
        random_model("gptj", "GPTJForCausalLM")
    assert built == [1]


def test_an_indexers_keys_are_a_layer_of_the_pool() -> None:
    config = {"kv_lora_rank": 32, "qk_rope_head_dim": 8, "index_head_dim": 64}
    geometry = bridged(random_model("glm_moe_dsa", "GlmMoeDsaForCausalLM", **config), 64).geometry
    heads = [layer.heads or geometry for layer in geometry.layers]
    sizes = [(one.tp_k_head_num, one.head_dim, one.v_head_dim) for one in heads]
    assert sorted(sizes) == [(1, 32, 8)] * 4 + [(1, 32, 32)] * 4


def test_a_dropped_key_would_depend_on_how_a_text_is_computed() -> None:
    with pytest.raises(ConfigError, match="keep_window_size=16.*lower max_context_len=64"):
        bridged(random_model("doge", "DogeForCausalLM", keep_window_size=16), 64)
    assert bridged(random_model("doge", "DogeForCausalLM", keep_window_size=64), 64)


def test_both_ways_say_why_they_refuse() -> None:
    reason = "cannot run as a flat decoder: .*; row by row it keeps what is not of its tokens"
    with pytest.raises(ModelLoadError, match=reason):
        bridged(random_model("cpmant", "CpmAntForCausalLM"), 64)


def test_an_fp8_cache_is_refused(bart: tuple[Path, Any]) -> None:
    with pytest.raises(ConfigError, match="FP8 KV cache is not for models that run row by row"):
        Engine.from_config(
            EngineConfig(model=str(bart[0]), device="cpu", num_pages=8, kv_cache_dtype="fp8_e4m3")
        )


def test_the_decoder_of_an_encoder_decoder_is_a_causal_model(tmp_path: Path) -> None:
    fields = {"vocab_size": 128, "d_model": 32, "decoder_layers": 1, "decoder_ffn_dim": 32}
    config = AutoConfig.for_model("pegasus", architectures=["PegasusForCausalLM"], **fields)
    assert config.is_encoder_decoder
    config.save_pretrained(tmp_path)
    assert load(tmp_path, load_format="dummy").implementation == "transformers"
