"""The native Qwen3-Next: its delta rule, its logits, its ranks and what it leaves alone."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, PreTrainedModel

from tests.fakes.model_rows import ModelRows, torch_native_backend
from tests.fakes.thread_ranks import ThreadRanks
from tests.fakes.tiny_models import eager_reference
from tests.fakes.tiny_reference import config_of, random_prompt, reference_logits
from tests.fakes.tiny_state_models import STATE_MODELS, save_state_model
from tests.proofs.served import serves
from workers.config import EngineConfig
from workers.errors import ConfigError
from workers.layers.delta import choice
from workers.layers.delta.rule import DeltaInputs, DeltaOutputs, delta_rule_in_torch
from workers.loading.loader import load_model
from workers.models.features import ModelFeature
from workers.models.qwen3_next import Qwen3NextForCausalLM
from workers.models.qwen3_next_family import qwen3_next_obstacle, qwen3_next_spec
from workers.models.registry import choose_implementation
from workers.parallel.group import SingleRank, TPGroup

CPU = torch.device("cpu")
NAME = "Qwen3NextForCausalLM"
PROMPT = random_prompt(90)


def random_inputs(rows: int, length: int) -> DeltaInputs:
    """Two value heads a key head."""
    torch.manual_seed(length)
    keys, values = (rows, length, 2, 8), (rows, length, 4, 6)
    g, beta = -torch.rand(values[:3]), torch.rand(values[:3])
    return DeltaInputs(torch.randn(keys), torch.randn(keys), torch.randn(values), g, beta)


def of_tokens(inputs: DeltaInputs, first: int, stop: int) -> DeltaInputs:
    return DeltaInputs(*(part[:, first:stop] for part in inputs))


def one_by_one(inputs: DeltaInputs, state: torch.Tensor) -> DeltaOutputs:
    made = []
    for token in range(inputs.q.shape[1]):
        out = delta_rule_in_torch(of_tokens(inputs, token, token + 1), state)
        made.append(out.made)
        state = out.state
    return DeltaOutputs(torch.cat(made, dim=1), state)


@pytest.mark.parametrize("length", [2, 64, 65, 130])
def test_tokens_in_chunks_do_what_they_do_one_by_one(length: int) -> None:
    inputs, state = random_inputs(2, length), torch.randn(2, 4, 8, 6)
    got, want = delta_rule_in_torch(inputs, state), one_by_one(inputs, state)
    torch.testing.assert_close(got.made, want.made, rtol=0, atol=1e-5)
    torch.testing.assert_close(got.state, want.state, rtol=0, atol=1e-5)


def test_a_token_decays_corrects_and_reads_the_state() -> None:
    """Of one head, by the definition."""
    torch.manual_seed(0)
    q, k, v, state = torch.randn(8), torch.randn(8), torch.randn(6), torch.randn(8, 6)
    g, beta = torch.tensor(-0.3), torch.tensor(0.7)
    parts = (x.view(1, 1, 1, -1) for x in (q, k, v))
    scalars = (x.view(1, 1, 1) for x in (g, beta))
    got = delta_rule_in_torch(DeltaInputs(*parts, *scalars), state[None, None])
    unit_q, unit_k = q / q.norm() / 8**0.5, k / k.norm()
    kept = state * g.exp()
    after = kept + torch.outer(unit_k, beta * (v - unit_k @ kept))
    torch.testing.assert_close(got.state[0, 0], after, rtol=0, atol=1e-5)
    torch.testing.assert_close(got.made[0, 0, 0], unit_q @ after, rtol=0, atol=1e-5)


def test_on_a_gpu_kernels_of_a_package_are_taken_where_there_are_any(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its recurrent kernel for a token on top of a state, its chunked one else."""
    called: list[tuple[str, bool]] = []

    def kernel(name: str) -> Any:
        def run(q: Any, k: Any, v: torch.Tensor, **given: Any) -> tuple[Any, Any]:
            assert given["use_qk_l2norm_in_kernel"]
            assert given["output_final_state"]
            called.append((name, given["initial_state"] is not None))
            return v, given["g"]

        return run

    kernels = SimpleNamespace(
        fused_recurrent_gated_delta_rule=kernel("one"), chunk_gated_delta_rule=kernel("many")
    )
    monkeypatch.setattr(choice.importlib, "import_module", lambda name: kernels)
    rule = choice.delta_rule_for(torch.device("cuda"))
    inputs, state = random_inputs(1, 3), torch.zeros(1)
    rule(inputs, None)
    rule(inputs, state)
    rule(of_tokens(inputs, 0, 1), None)
    rule(of_tokens(inputs, 0, 1), state)
    assert called == [("many", False), ("many", True), ("many", False), ("one", True)]

    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(choice.importlib, "import_module", missing)
    assert choice.delta_rule_for(torch.device("cuda")) is delta_rule_in_torch
    assert "runs in plain torch" in caplog.text


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("qwen3_next")


@pytest.fixture(scope="module")
def reference(folder: Path) -> PreTrainedModel:
    return save_state_model("qwen3_next", folder)


def rows_of(folder: Path, tp: TPGroup, **changes: Any) -> ModelRows:
    config = EngineConfig(model=str(folder), model_impl="native", **changes)
    with torch.inference_mode(mode=False):
        loaded = load_model(config, tp, CPU, torch.float32)
    assert type(loaded.model) is Qwen3NextForCausalLM
    return ModelRows(loaded, torch_native_backend(loaded))


def logits_of(folder: Path, pieces: Sequence[int], tp: TPGroup, **changes: Any) -> torch.Tensor:
    """Of PROMPT, in so many tokens a step."""
    rows, steps = rows_of(folder, tp, **changes), torch.tensor(PROMPT)
    return torch.cat([rows.step({0: one.tolist()})[0] for one in steps.split(list(pieces))])


@serves(NAME, ModelFeature.CPU)
def test_logits_are_those_of_transformers(folder: Path, reference: PreTrainedModel) -> None:
    got = logits_of(folder, [len(PROMPT)], SingleRank())
    torch.testing.assert_close(got, reference_logits(reference, PROMPT), rtol=0, atol=1e-4)


def test_64_greedy_tokens_are_those_of_transformers(
    folder: Path, reference: PreTrainedModel
) -> None:
    """Of all tokens at once, given which every token is the likeliest of the steps."""
    prompt = PROMPT[:40]
    tokens, _ = rows_of(folder, SingleRank()).greedy_logits(0, prompt, 64)
    want = reference_logits(reference, tokens)
    assert want[len(prompt) - 1 : -1].argmax(-1).tolist() == tokens[len(prompt) :]


@pytest.fixture
def remembering(folder: Path, reference: PreTrainedModel, tmp_path: Path) -> Path:
    """The same with states that decay slowly. Where they forget a token at once, what is read of
    them is at times next to nothing before it is normalised: transformers' own steps then differ
    from its logits of all tokens at once, and from both in float64, by several 1e-4."""
    tensors = load_file(folder / "model.safetensors")
    slower = {name: tensors[name] - 4.0 for name in tensors if name.endswith("A_log")}
    assert slower
    save_file({**tensors, **slower}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    reference.config.save_pretrained(tmp_path)
    return tmp_path


@torch.inference_mode()
def own_steps(model: PreTrainedModel, tokens: Sequence[int]) -> torch.Tensor:
    """transformers' logits, one token at a time on top of its own cache."""
    cache, logits = None, []
    for token in tokens:
        output = model(torch.tensor([[token]]), past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        logits.append(output.logits[0])
    return torch.cat(logits)


def test_one_by_one_logits_are_those_of_transformers_one_by_one(remembering: Path) -> None:
    got = logits_of(remembering, [1] * len(PROMPT), SingleRank())
    want = own_steps(eager_reference(remembering), PROMPT)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4)


@pytest.mark.usefixtures("reference")
def test_ranks_compute_what_one_does(folder: Path) -> None:
    pieces = [70, 17, 1, 1, 1]
    want = logits_of(folder, pieces, SingleRank())
    for ep_size in (1, 2):
        settings = {"tp_size": 2, "ep_size": ep_size}
        outputs = ThreadRanks(2).run(
            lambda tp, settings=settings: logits_of(folder, pieces, tp, **settings)
        )
        assert torch.equal(outputs[0], outputs[1])
        torch.testing.assert_close(outputs[0], want, rtol=0, atol=2e-4)


@pytest.mark.usefixtures("reference")
def test_key_heads_that_cannot_be_divided_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="linear_num_key_heads=2 cannot be divided"):
        ThreadRanks(4).run(lambda tp: logits_of(folder, [90], tp, tp_size=4))


def test_the_spec_of_the_published_model() -> None:
    """Its config's defaults but for what it states, 80B with 3B of them active."""
    config = AutoConfig.for_model("qwen3_next")
    spec = qwen3_next_spec(config)
    assert spec.attending == tuple(range(3, 48, 4))
    assert len(spec.layers) == 12
    assert spec.rope.rotary_dim == 64
    assert (spec.delta.channels, spec.delta.share) == (8192, 2)
    assert (spec.mixture.num_experts, spec.mixture.num_pieces) == (512, 1)
    auto, native = (EngineConfig(model="m", model_impl=impl) for impl in ("auto", "native"))
    assert choose_implementation(config, NAME, auto, "cpu") == "native"
    assert choose_implementation(config, NAME, auto, "cuda") == "transformers"
    assert choose_implementation(config, NAME, native, "cuda") == "native"


ODDITIES = {
    "activation": ({"hidden_act": "gelu"}, "silu activations only, not 'gelu'"),
    "layers": ({"layer_types": ["full_attention"] * 4}, "are not those of Qwen3-Next"),
    "heads": ({"linear_num_value_heads": 3}, "3 value heads do not share 2 key heads"),
    "no heads": ({"linear_num_key_heads": 0}, "linear_num_key_heads=0 is less than 1"),
    "no convolution": ({"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim=0 is less than 1"),
    "experts": ({"num_experts_per_tok": 0}, "cannot take 0 of"),
}


@pytest.mark.parametrize(("changes", "reason"), ODDITIES.values(), ids=ODDITIES)
def test_oddities_are_named(changes: dict[str, Any], reason: str) -> None:
    config = config_of("qwen3_next", NAME, {**STATE_MODELS["qwen3_next"][1], **changes})
    obstacle = qwen3_next_obstacle(config)
    assert obstacle is not None
    assert reason in obstacle
