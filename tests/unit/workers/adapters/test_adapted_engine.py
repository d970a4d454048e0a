"""Adapters in the engine: the tokens of models that were merged with them, however many share a
batch."""

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from tests.fakes.adapters import ATTENTION, EVERY, greedy_tokens, merged_reference, save_adapter
from tests.fakes.thread_ranks import ThreadRanks
from tests.fakes.tiny_models import (
    MIXTURES,
    NATIVE,
    TINY_MODELS,
    eager_reference,
    one_of_each,
    random_prompt,
    save_tiny_model,
)
from tests.proofs.served import serves
from workers import Engine
from workers.adapters.folder import adapter_at
from workers.config import EngineConfig
from workers.engine.protocol import FinishReason, GenerateRequest
from workers.errors import ConfigError, ErrorCode, RequestRejectedError
from workers.models.features import ModelFeature, native_capability
from workers.runner.factory import make_model_runner
from workers.sampling.params import SamplingParams
from workers.scheduler.scheduler import Scheduler

NUM_TOKENS = 6
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
PROMPTS = [random_prompt(length, seed=length) for length in (5, 26)]
ADAPTERS = {
    "every": {"rank": 8},
    "rslora": {"rank": 16, "use_rslora": True, "lora_alpha": 3},
    "attention": {
        "rank": 4,
        "targets": ATTENTION,
        "rank_pattern": {"q_proj": 7},
        "alpha_pattern": {"v_proj": 13},
    },
}


class Served:
    """A model's folder, adapters by name, and what each says to the prompts; "" is the model."""

    def __init__(self, tiny, folder):
        self.folder = save_tiny_model(tiny, folder / "model")
        self.base = eager_reference(self.folder).eval()
        self.adapters = {
            name: save_adapter(folder / name, self.base, seed, **changes)
            for seed, (name, changes) in enumerate(ADAPTERS.items())
        }
        models = {"": self.base} | {
            name: merged_reference(self.folder, adapter) for name, adapter in self.adapters.items()
        }
        self.expected = {
            name: [greedy_tokens(model, prompt, NUM_TOKENS) for prompt in PROMPTS]
            for name, model in models.items()
        }

    def config(self, **changes):
        return EngineConfig(
            **{"model": str(self.folder), "device": "cpu", "page_size": 4, "max_loras": 4} | changes
        )

    def engine(self, **changes):
        return Engine.from_config(self.config(**changes))

    def refs(self, engine, names):
        return self.refs_of(engine.info.adapters, names)

    def refs_of(self, info, names):
        return [adapter_at(name, self.adapters[name], info) if name else None for name in names]

    def check(self, engine, names):
        """Every prompt under every name, in one batch."""
        names = [name for name in names for _ in PROMPTS]
        prompts = PROMPTS * (len(names) // len(PROMPTS))
        results = engine.generate(prompts, GREEDY, adapters=self.refs(engine, names))
        for index, (name, result) in enumerate(zip(names, results, strict=True)):
            assert result.token_ids == self.expected[name][index % len(PROMPTS)], name
        engine.check_integrity()
        return results


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return Served(NATIVE["llama3"], tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"max_step_tokens": 16},
        pytest.param({"max_loras": 1}, marks=pytest.mark.nightly),
        pytest.param({"enable_overlap": False}, marks=pytest.mark.nightly),
        pytest.param({"speculative": "ngram"}, marks=pytest.mark.nightly),
        pytest.param({"deterministic": True}, marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_texts_are_those_of_merged_models_in_one_batch(llama, changes) -> None:
    engine = llama.engine(**changes)
    try:
        assert any(llama.expected[name] != llama.expected[""] for name in llama.adapters), (
            "adapters that change nothing test nothing"
        )
        llama.check(engine, ["every", "", "rslora", "attention"])
        # Again, with whatever is cached by now.
        results = llama.check(engine, ["", "attention", "rslora", "every"])
        if changes == {}:
            assert all(result.num_cached_tokens for result in results[1:])
    finally:
        engine.close()


@serves(ModelFeature.LORA)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "gemma2" else pytest.mark.nightly)
        for architecture, name in one_of_each().items()
        if ModelFeature.LORA in native_capability(architecture).features
    ],
)
def test_every_family(name, tmp_path) -> None:
    folder = save_tiny_model(TINY_MODELS[name], tmp_path / "model")
    base = eager_reference(folder).eval()
    targets = ATTENTION if name in MIXTURES else EVERY
    adapter = save_adapter(tmp_path / "adapter", base, 0, targets=targets)
    models = merged_reference(folder, adapter), base
    expected = [greedy_tokens(model, PROMPTS[1], NUM_TOKENS) for model in models]
    config = EngineConfig(model=str(folder), device="cpu", max_loras=1, model_impl="native")
    engine = Engine.from_config(config)
    try:
        ref = adapter_at("one", adapter, engine.info.adapters)
        told = replace(GREEDY, logprobs=0)
        results = engine.generate([PROMPTS[1]] * 2, told, adapters=[ref, None])
    finally:
        engine.close()
    assert [result.token_ids for result in results] == expected
    logprobs = [first_logprob(model, PROMPTS[1]) for model in models]
    assert [one.logprobs[0].logprob for one in results] == pytest.approx(logprobs, abs=1e-4)
    assert abs(logprobs[0] - logprobs[1]) > 1e-3, "an adapter that changes nothing tests nothing"


def first_logprob(model, prompt):
    with torch.inference_mode():
        return float(model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1).max())


def test_no_prefix_is_shared_between_adapters(llama) -> None:
    engine = llama.engine()
    try:
        every, attention = llama.refs(engine, ["every", "attention"])
        prompt = [PROMPTS[1]]
        (first,) = engine.generate(prompt, GREEDY, adapters=[every])
        (other,) = engine.generate(prompt, GREEDY, adapters=[attention])
        (base,) = engine.generate(prompt, GREEDY)
        (again,) = engine.generate(prompt, GREEDY, adapters=[every])
    finally:
        engine.close()
    assert [one.num_cached_tokens for one in (first, other, base)] == [0, 0, 0]
    assert again.num_cached_tokens >= 24


def test_retraction_changes_nothing(llama) -> None:
    engine = llama.engine(num_pages=18)
    # Admission leaves no room for output.
    engine._scheduler._forecast.new_tokens = np.zeros_like
    names = ["every", "", "rslora"]
    try:
        # Both adapters are kept from then on, so that all requests of the second time run together.
        llama.check(engine, names)
        num_before = engine.stats().num_preemptions
        llama.check(engine, names)
        assert engine.stats().num_preemptions > num_before
    finally:
        engine.close()


def test_forty_adapters_cycle_through_four_slots(llama, tmp_path) -> None:
    engine = llama.engine(max_cpu_loras=40, max_running_requests=16)
    targets = ("q_proj", "down_proj")
    try:
        folders = [
            save_adapter(tmp_path / str(seed), llama.base, seed, 2, targets) for seed in range(40)
        ]
        info = engine.info.adapters
        refs = [adapter_at(str(index), one, info) for index, one in enumerate(folders)]
        prompts = [random_prompt(6, seed) for seed in range(2)]
        short = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
        results = engine.generate(prompts * 40, short, adapters=[one for one in refs for _ in "12"])
        assert [len(result.token_ids) for result in results] == [2] * 80
        for index in (13, 39):
            model = merged_reference(llama.folder, folders[index])
            for prompt, result in zip(prompts, results[2 * index :], strict=False):
                assert result.token_ids == greedy_tokens(model, prompt, 2)
        engine.check_integrity()
    finally:
        engine.close()


def test_ranks_cut_adapters_as_they_cut_the_layers(llama) -> None:
    expected = [llama.expected[name][0] for name in ("every", "", "attention")]

    def work(rank):
        config = llama.config(tp_size=2)
        with torch.inference_mode(False):
            runner = make_model_runner(config, rank, torch.device("cpu"), lambda *_: None)
        scheduler = Scheduler(runner.scheduler_config(config))
        refs = llama.refs_of(runner.model_info(config).adapters, ("every", "", "attention"))
        for index, ref in enumerate(refs):
            scheduler.submit(GenerateRequest(str(index), PROMPTS[0], GREEDY, adapter=ref))
        tokens = {str(index): [] for index in range(len(refs))}
        while scheduler.has_work:
            plan = scheduler.schedule()
            for output in scheduler.commit(plan, runner.run(plan).result):
                tokens[output.request_id] += output.token_ids
        return list(tokens.values())

    assert ThreadRanks(2).run(work) == [expected, expected]


def test_files_that_have_changed_are_not_read(llama, tmp_path) -> None:
    folder = save_adapter(tmp_path / "one", llama.base, 0)
    engine = llama.engine()
    try:
        ref = adapter_at("one", folder, engine.info.adapters)
        save_adapter(folder, llama.base, 1)
        engine.submit(GenerateRequest("r", [5], GREEDY, adapter=ref))
        outputs = []
        while engine.has_work:
            outputs += engine.step()
    finally:
        engine.close()
    (output,) = outputs
    assert output.finish_reason is FinishReason.ERROR
    assert output.error.code is ErrorCode.ADAPTER_UNAVAILABLE
    assert output.error.message.endswith("its files have changed since it was loaded")
    assert str(folder) not in output.error.message


def test_more_adapters_than_the_host_has_room_for_are_refused(llama) -> None:
    engine = llama.engine(max_loras=2, max_cpu_loras=2)
    try:
        refs = llama.refs(engine, ["every", "rslora", "attention"])
        for index in range(2):
            engine.submit(GenerateRequest(str(index), [5], GREEDY, adapter=refs[index]))
        with pytest.raises(RequestRejectedError, match="have 2 adapters") as refused:
            engine.submit(GenerateRequest("2", [5], GREEDY, adapter=refs[2]))
        assert refused.value.code is ErrorCode.QUEUE_FULL
        engine.abort("0")
        while engine.has_work:
            engine.step()
        # What nobody has any more gives way.
        engine.generate([[5]], GREEDY, adapters=[refs[2]])
    finally:
        engine.close()


def test_an_engine_without_slots_takes_no_adapter(llama) -> None:
    engine = llama.engine(max_loras=0)
    try:
        assert engine.info.adapters is None
        with_slots = llama.engine()
        ref = llama.refs(with_slots, ["every"])[0]
        with_slots.close()
        with pytest.raises(RequestRejectedError, match="takes no adapters"):
            engine.submit(GenerateRequest("r", [5], GREEDY, adapter=ref))
    finally:
        engine.close()


def test_models_in_transformers_own_code_refuse_at_the_start(llama) -> None:
    with pytest.raises(ConfigError, match="max_loras: .* takes no adapters"):
        llama.engine(model_impl="transformers")
