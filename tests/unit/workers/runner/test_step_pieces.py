"""Steps that do not fit into the device's memory run in pieces, and nobody pays for another's."""

import numpy as np
import pytest
import torch

from tests.fakes.logprobs import prompt_entries
from tests.fakes.tiny_models import NATIVE, VOCAB_SIZE, save_tiny_model
from workers import Engine
from workers.config import EngineConfig
from workers.engine.protocol import FinishReason, GenerateRequest
from workers.errors import ErrorCode
from workers.runner import step_pieces
from workers.runner.model_runner import ModelRunner
from workers.runner.step_pieces import split_plan
from workers.sampling.params import SamplingParams
from workers.sampling.state import SamplingState
from workers.scheduler.plan import AdmittedRequest, PromptLogprobRow, StepPlan

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
ASKING = SamplingParams(
    temperature=0.8, seed=5, max_tokens=6, ignore_eos=True, logprobs=2, prompt_logprobs=1,
    repetition_penalty=1.3, presence_penalty=0.5,
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return save_tiny_model(NATIVE["llama3"], tmp_path_factory.mktemp("llama3"))


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(step_pieces, "MIN_PIECE_TOKENS", 2)


def prompts(num: int, num_tokens: int = 23) -> list[list[int]]:
    rng = np.random.default_rng(7)
    return [rng.integers(3, VOCAB_SIZE, num_tokens + n).tolist() for n in range(num)]


def run_all(folder: str, params, **settings):
    """Every request's outputs, joined, by id; memory is proven to be whole after each."""
    engine = Engine.from_config(EngineConfig(model=folder, page_size=4, **settings))
    for index, (prompt, own) in enumerate(zip(prompts(len(params)), params, strict=True)):
        engine.submit(GenerateRequest(str(index), prompt, own))
    outputs = []
    while engine.has_work:
        outputs += engine.step()
        engine.check_integrity()
    assert engine.stats().num_used_pages == 0
    engine.close()
    ends = {one.request_id: one for one in outputs if one.finish_reason is not None}
    assert len(ends) == len(params)
    told = {
        name: [token for one in outputs if one.request_id == name for token in one.token_ids]
        for name in ends
    }
    return told, ends, outputs


def logprob_values(outputs) -> list[float]:
    """Of requests in their order, prompts first."""
    of_prompts = [
        entry.logprob
        for one in sorted(outputs, key=lambda one: one.request_id)
        for entry in prompt_entries(one) or ()
        if entry is not None
    ]
    of_output = [
        entry.logprob
        for one in sorted(outputs, key=lambda one: one.request_id)
        for entry in one.logprobs or ()
    ]
    return of_prompts + of_output


def out_of_memory_beyond(monkeypatch, max_tokens: int) -> list[StepPlan]:
    """Steps of more tokens raise; the plans that ran."""
    launch, ran = ModelRunner._launch, []

    def limited(self: ModelRunner, plan: StepPlan):
        if plan.num_tokens > max_tokens:
            raise torch.OutOfMemoryError("injected")
        ran.append(plan)
        return launch(self, plan)

    monkeypatch.setattr(ModelRunner, "_launch", limited)
    return ran


@pytest.mark.parametrize("max_tokens", [40, 9, 3, 2])
def test_a_step_in_pieces_gives_what_the_whole_gives(folder, monkeypatch, max_tokens):
    params = [GREEDY, ASKING, ASKING, GREEDY]
    expected, _, expected_outputs = run_all(folder, params)
    assert any(one.prompt_logprobs for one in expected_outputs)
    ran = out_of_memory_beyond(monkeypatch, max_tokens)
    told, ends, outputs = run_all(folder, params)
    assert told == expected
    assert {one.finish_reason for one in ends.values()} == {FinishReason.LENGTH}
    np.testing.assert_allclose(logprob_values(outputs), logprob_values(expected_outputs), atol=1e-4)
    assert max(plan.num_tokens for plan in ran) <= max_tokens


def test_sampling_that_does_not_fit_is_done_row_by_row_and_counted_once(folder, monkeypatch):
    params = [ASKING, GREEDY, ASKING]
    expected, _, _ = run_all(folder, params)
    sample, num_refused = SamplingState.sample, []

    def one_row(self, logits, slots, seq_lens, drafts=None):
        if len(slots) > 1:
            num_refused.append(len(slots))
            raise torch.OutOfMemoryError("injected")
        return sample(self, logits, slots, seq_lens, drafts)

    monkeypatch.setattr(SamplingState, "sample", one_row)
    told, _, _ = run_all(folder, params)
    assert told == expected
    assert num_refused


def test_what_is_tried_again_counts_no_output_twice(folder, monkeypatch):
    asking = SamplingParams(
        temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=1, frequency_penalty=0.05
    )
    expected, _, _ = run_all(folder, [asking] * 3)
    counts: list[tuple[int, ...]] = []
    of_sampled, count = SamplingState._logprobs, SamplingState._count_output

    def one_row(self, logits, pieces, host):
        if len(logits) > 1:
            raise torch.OutOfMemoryError("injected")
        return of_sampled(self, logits, pieces, host)

    def counted(self, piece, token_ids):
        counts.append(tuple(piece.rows.slots.tolist()))
        count(self, piece, token_ids)

    monkeypatch.setattr(SamplingState, "_logprobs", one_row)
    monkeypatch.setattr(SamplingState, "_count_output", counted)
    told, _, _ = run_all(folder, [asking] * 3)
    assert told == expected
    assert len(counts) == sum(len(tokens) for tokens in told.values())


@pytest.mark.parametrize("max_step_tokens", [8192, 8])
def test_a_row_that_fits_nowhere_ends_its_own_request(folder, monkeypatch, max_step_tokens):
    params = [GREEDY, ASKING, GREEDY]
    expected, _, _ = run_all(folder, params)

    def refuse(self, hidden, plan, row):
        raise torch.OutOfMemoryError("injected")

    monkeypatch.setattr(ModelRunner, "_prompt_logprobs", refuse)
    told, ends, _ = run_all(folder, params, max_step_tokens=max_step_tokens)
    assert (told["0"], told["1"], told["2"]) == (expected["0"], [], expected["2"])
    assert ends["1"].finish_reason is FinishReason.ERROR
    assert ends["1"].error is not None
    assert ends["1"].error.code is ErrorCode.OUT_OF_MEMORY
    assert ends["0"].finish_reason is ends["2"].finish_reason is FinishReason.LENGTH


def test_where_nothing_fits_every_request_ends_and_the_engine_lives(folder, monkeypatch):
    with monkeypatch.context() as patched:
        out_of_memory_beyond(patched, 0)
        _, ends, _ = run_all(folder, [GREEDY, ASKING])
    assert {one.error.code for one in ends.values()} == {ErrorCode.OUT_OF_MEMORY}
    assert all(one.finish_reason is FinishReason.ERROR for one in ends.values())


def test_ranks_of_a_group_do_not_part(folder, monkeypatch):
    out_of_memory_beyond(monkeypatch, 4)
    engine = Engine.from_config(EngineConfig(model=folder))
    monkeypatch.setattr(engine._executor._run_step.__self__, "_is_alone", False)
    with pytest.raises(torch.OutOfMemoryError):
        engine.generate(prompts(1), GREEDY)
    engine.close()


def int32(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def test_halves_do_in_turn_what_a_plan_does():
    admitted = AdmittedRequest(2, 0, GREEDY, num_prompt_tokens=5)
    plan = StepPlan(
        step_id=3,
        is_decode=False,
        slots=int32(0, 1, 2),
        num_new_tokens=int32(1, 1, 5),
        prefix_lens=int32(9, 4, 0),
        samples=int32(1, 1, 1),
        input_ids=int32(-1, -1, 1, 2, 3, 4, 5),
        out_cache_loc=int32(19, 14, 20, 21, 22, 23, 24),
        admitted=(admitted,),
        cleared=int32(7),
        prompt_logprobs=(PromptLogprobRow(2, 1, int32(2, 3, 4, 5)),),
    )
    decode, prompt = split_plan(plan)
    assert (decode.is_decode, decode.slots.tolist(), decode.admitted) == (True, [0, 1], (admitted,))
    assert decode.cleared.tolist() == [7]
    assert not decode.prompt_logprobs
    assert (prompt.slots.tolist(), prompt.admitted, len(prompt.cleared)) == ([2], (), 0)
    assert [want.row for want in prompt.prompt_logprobs] == [0]
    first, second = split_plan(prompt)
    assert (first.input_ids.tolist(), second.input_ids.tolist()) == ([1, 2], [3, 4, 5])
    assert (first.out_cache_loc.tolist(), second.out_cache_loc.tolist()) == ([20, 21], [22, 23, 24])
    assert (first.samples.tolist(), second.samples.tolist()) == ([0], [1])
    assert (first.prefix_lens.tolist(), second.prefix_lens.tolist()) == ([0], [2])
    targets = [
        want.target_ids.tolist() for half in (first, second) for want in half.prompt_logprobs
    ]
    assert targets == [[2, 3], [4, 5]]
    assert split_plan(first) is None
