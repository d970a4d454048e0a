"""Adapters of the embedding and of experts: the texts of PEFT's own model."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.fakes.adapters import greedy_tokens
from tests.fakes.peft_adapters import EXPERT_TENSORS, save_peft_adapter
from tests.fakes.thread_ranks import ThreadRanks
from tests.fakes.tiny_models import TINY_MODELS, eager_reference, random_prompt, save_tiny_model
from workers import Engine
from workers.adapters.folder import adapter_at
from workers.config import EngineConfig
from workers.engine.protocol import GenerateRequest
from workers.errors import AdapterError, ConfigError
from workers.loading.expert_load_file import write_expert_loads
from workers.runner.factory import make_model_runner
from workers.sampling.params import SamplingParams
from workers.scheduler.scheduler import Scheduler

NUM_TOKENS = 6
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0)
PROMPT = random_prompt(26, seed=26)
EMBEDDING = {"target_modules": ["q_proj", "embed_tokens"]}
EXPERTS = {"target_modules": ["o_proj"], "target_parameters": list(EXPERT_TENSORS)}
SHARED = ["o_proj", "shared_expert.gate_proj", "shared_expert.up_proj", "shared_expert.down_proj"]
SHARED_GLM = [name.replace("shared_expert", "shared_experts") for name in SHARED]


class Case:
    """A tiny model and an adapter that PEFT saved of it."""

    def __init__(self, name, folder, **config):
        self.folder = save_tiny_model(TINY_MODELS[name], folder / "model")
        self.adapter = folder / "adapter"
        self.base = eager_reference(self.folder).eval()
        self.model = save_peft_adapter(self.adapter, self.folder, **config)
        self.expected = [greedy_tokens(one, PROMPT, NUM_TOKENS) for one in (self.model, self.base)]

    def config(self, **changes):
        whole = {"lora_embeddings": True, "max_loras": 2, "model_impl": "native", "page_size": 4}
        return EngineConfig(**{"model": str(self.folder), "device": "cpu", **whole, **changes})

    def check(self, **changes):
        """Beside the model itself, whole and in chunks."""
        engine = Engine.from_config(self.config(**changes))
        try:
            ref = adapter_at("one", self.adapter, engine.info.adapters)
            results = engine.generate([PROMPT] * 2, GREEDY, adapters=[ref, None])
            engine.check_integrity()
        finally:
            engine.close()
        assert [one.token_ids for one in results] == self.expected
        logprobs = [first_logprob(one) for one in (self.model, self.base)]
        assert [one.logprobs[0].logprob for one in results] == pytest.approx(logprobs, abs=1e-4)
        assert abs(logprobs[0] - logprobs[1]) > 1e-2, "this adapter changes nothing"

    def tokens_of_ranks(self, **changes):
        """Of each rank of two, of the adapter's request and of the model's."""

        def work(rank):
            config = self.config(tp_size=2, **changes)
            with torch.inference_mode(False):
                runner = make_model_runner(config, rank, torch.device("cpu"), lambda *_: None)
            scheduler = Scheduler(runner.scheduler_config(config))
            ref = adapter_at("one", self.adapter, runner.model_info(config).adapters)
            # The second row's tokens go to copies of experts, where there are any.
            for name, one in (("1", None), ("0", ref)):
                scheduler.submit(GenerateRequest(name, PROMPT, GREEDY, adapter=one))
            tokens = {"0": [], "1": []}
            while scheduler.has_work:
                plan = scheduler.schedule()
                for output in scheduler.commit(plan, runner.run(plan).result):
                    tokens[output.request_id] += output.token_ids
            return list(tokens.values())

        return ThreadRanks(2).run(work)


def first_logprob(model):
    with torch.inference_mode():
        return float(model(torch.tensor([PROMPT])).logits[0, -1].log_softmax(-1).max())


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return Case("llama3", tmp_path_factory.mktemp("llama"), **EMBEDDING)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return Case("qwen3_moe", tmp_path_factory.mktemp("qwen"), **EXPERTS)


@pytest.mark.parametrize("changes", [{}, {"max_step_tokens": 16}], ids=str)
def test_embeddings_are_pefts(llama, changes) -> None:
    llama.check(**changes)


@pytest.mark.parametrize("changes", [{}, {"max_step_tokens": 16}], ids=str)
def test_experts_are_pefts(qwen, changes) -> None:
    qwen.check(lora_experts=True, **changes)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("gemma2", EMBEDDING),
        ("gemma3", EMBEDDING),
        ("mixtral", EXPERTS),
        ("gpt_oss", EXPERTS),
        ("qwen2_moe", EXPERTS | {"target_modules": SHARED}),
        ("glm4_moe", EXPERTS | {"target_modules": SHARED_GLM}),
        (
            "qwen3_moe",
            {"target_modules": ["embed_tokens"], "target_parameters": EXPERT_TENSORS[:1]},
        ),
        ("qwen3_moe", EXPERTS | {"use_rslora": True, "r": 3}),
    ],
    ids=str,
)
def test_other_families(name, config, tmp_path) -> None:
    has_experts = "target_parameters" in config
    Case(name, tmp_path, **config).check(lora_experts=has_experts)


def test_ranks_have_all_of_an_embeddings_adapter(llama) -> None:
    assert llama.tokens_of_ranks() == [llama.expected] * 2


@pytest.mark.parametrize("ep_size", [1, 2])
def test_ranks_cut_and_divide_adapters_as_their_experts(qwen, ep_size) -> None:
    found = qwen.tokens_of_ranks(lora_experts=True, ep_size=ep_size)
    assert found == [qwen.expected] * 2


def test_copies_of_busy_experts_have_their_adapters(tmp_path) -> None:
    case, loads = Case("qwen3_moe", tmp_path, size=0.5, **EXPERTS), tmp_path / "loads.json"
    write_expert_loads(loads, [[100 - expert for expert in range(8)]])
    copies = {"num_redundant_experts": 4, "expert_load_file": str(loads)}
    found = case.tokens_of_ranks(lora_experts=True, ep_size=2, **copies)
    assert found == [case.expected] * 2


@pytest.mark.nightly
@pytest.mark.parametrize("ep_size", [1, 2])
def test_ranks_cut_and_divide_adapters_of_shared_experts(tmp_path, ep_size) -> None:
    case = Case("qwen2_moe", tmp_path, **EXPERTS | {"target_modules": SHARED})
    found = case.tokens_of_ranks(lora_experts=True, ep_size=ep_size)
    assert found == [case.expected] * 2


@pytest.mark.parametrize(
    ("name", "block", "parts"),
    [
        ("qwen3_moe", "mlp", ("gate_proj", "up_proj", "down_proj")),
        pytest.param("mixtral", "block_sparse_moe", ("w1", "w3", "w2"), marks=pytest.mark.nightly),
    ],
)
def test_modules_of_single_experts_add_as_tensors_of_all(name, block, parts, tmp_path) -> None:
    """As PEFT saved them of transformers before 5, of unlike ranks; of one expert nothing."""
    case = Case(name, tmp_path, **EXPERTS)
    silence(case, expert=2)
    split(case.adapter, block, parts, left_out=2)
    case.check(lora_experts=True)


def silence(case, expert):
    """PEFT's model adds nothing to this one."""
    for parameter_name, parameter in case.model.named_parameters():
        if "experts" in parameter_name and "lora_B" in parameter_name:
            parameter.data.view(len(parameter), 4, -1)[:, :, expert] = 0
    case.expected[0] = greedy_tokens(case.model, PROMPT, NUM_TOKENS)


def split(folder, block, parts, left_out):
    """The adapter's tensors of all experts as modules of each. The second expert's gate has a
    rank more, which adds nothing, and its scale."""
    path = folder / "adapter_model.safetensors"
    tensors, pattern = load_file(path), {}
    for name in [one for one in tensors if one.endswith("lora_A.weight") and ".experts" in one]:
        a, b = tensors.pop(name), tensors.pop(name.replace("lora_A", "lora_B"))
        is_gate_up = ".base_layer." in name
        prefix = name.split(".lora_A")[0].removesuffix(".base_layer").replace(".mlp.", f".{block}.")
        by_expert = a.view(len(a) // 4, 4, -1), b.view(len(b), 4, -1).permute(2, 0, 1)
        for expert, (own, whole) in enumerate(zip(*by_expert, strict=True)):
            rows = whole.chunk(2) if is_gate_up else [whole]
            for part, out in zip(parts[:2] if is_gate_up else parts[2:], rows, strict=True):
                module, pair = f"{prefix}.{expert}.{part}", (own, out)
                if expert == 1 and part == parts[0]:
                    more = torch.ones_like(own[:1]), torch.zeros_like(out[:, :1])
                    pair = torch.cat([own, more[0]]), torch.cat([out, more[1]], dim=1) * 5 / 4
                    pattern[re.escape(module.removeprefix("base_model.model."))] = 5
                if expert != left_out:
                    tensors[f"{module}.lora_A.weight"] = pair[0].clone()
                    tensors[f"{module}.lora_B.weight"] = pair[1].contiguous()
    save_file(tensors, path)
    change(folder, rank_pattern=pattern, target_parameters=None)


def change(folder, **changes):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def swapped(tensors):
    """As PEFT before 0.19.1 had them."""
    found = dict(tensors)
    for name, a in tensors.items():
        if "experts" in name and "lora_A" in name:
            other = name.replace("lora_A", "lora_B")
            num_experts = len(a) // 4
            by_expert = a.view(num_experts, 4, -1).permute(2, 1, 0)
            found[other] = by_expert.reshape(a.shape[1], -1).contiguous()
            b = tensors[other].view(len(tensors[other]), 4, num_experts)
            found[name] = b.permute(2, 1, 0).reshape(-1, len(b)).contiguous()
    return found


def test_what_older_versions_of_peft_took_for_inputs(tmp_path) -> None:
    """Of gate and up of this model both are 64: by the version or not at all."""
    case = Case("qwen3_moe", tmp_path, **EXPERTS | {"target_parameters": EXPERT_TENSORS[1:]})
    path = case.adapter / "adapter_model.safetensors"
    save_file(swapped(load_file(path)), path)
    change(case.adapter, peft_version="0.18.1")
    case.check(lora_experts=True)


def test_inputs_that_cannot_be_told_are_refused(qwen, tmp_path) -> None:
    config = json.loads((qwen.adapter / "adapter_config.json").read_text())
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / name).write_bytes((qwen.adapter / name).read_bytes())
    assert config["peft_version"] >= "0.19.1"
    change(tmp_path, peft_version=None)
    with refusing(qwen, "cannot be told what are inputs", lora_experts=True) as info:
        adapter_at("one", tmp_path, info)


@pytest.mark.parametrize(
    ("case", "flag", "module"),
    [
        ("llama", "lora_embeddings", "model.embed_tokens"),
        ("qwen", "lora_experts", "model.layers.1.mlp.experts"),
    ],
)
def test_what_slots_have_no_memory_for_is_refused(case, flag, module, request) -> None:
    case = request.getfixturevalue(case)
    with refusing(case, f"it changes {module}; .* engine.{flag}", **{flag: False}) as info:
        adapter_at("one", case.adapter, info)


class refusing:  # noqa: N801
    """Gives what an engine takes; AdapterError with the message is raised within."""

    def __init__(self, case, message, **changes):
        self._engine = Engine.from_config(case.config(**changes))
        self._raises = pytest.raises(AdapterError, match=message)

    def __enter__(self):
        self._raises.__enter__()
        return self._engine.info.adapters

    def __exit__(self, *error):
        self._engine.close()
        return self._raises.__exit__(*error)


def test_a_model_without_experts_refuses_them_at_the_start(llama) -> None:
    with pytest.raises(ConfigError, match="lora_experts: LlamaForCausalLM has no experts"):
        Engine.from_config(llama.config(lora_experts=True))


@pytest.mark.parametrize("flag", ["lora_embeddings", "lora_experts"])
def test_flags_without_slots_are_refused(flag) -> None:
    with pytest.raises(ConfigError, match=f"{flag}: adapters need slots"):
        EngineConfig(model="any", **{flag: True})
