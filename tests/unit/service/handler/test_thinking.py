"""A thinking budget: the text is cut at the same token whatever came how, and goes on."""

import asyncio
import random

import pytest

from service.handler.thinking import BudgetedBackend, ThinkingPlan
from service.request_context import RequestContext
from tests.fakes.backend import FakeBackend
from workers.engine.protocol import FinishReason, GenerateRequest, StepOutput
from workers.sampling.params import SamplingParams

BEGIN, END, EOS = 1, 2, 3
END_IDS = (9, END)


class Pieces:
    """Token 1 is <t>, token 2 is </t>, others are letters."""

    def token_bytes(self, token_id):
        return {BEGIN: b"<t>", END: b"</t>"}.get(token_id, b"a%d" % token_id)


class Model:
    """Says a text that depends on where it is, in outputs of several tokens, and counts requests.

    ends_at: how many tokens it thinks by itself.
    """

    def __init__(self, ends_at, *, begins, sizes):
        self.ends_at = ends_at
        self.begins = begins
        self.sizes = sizes
        self.requests = []

    def __call__(self, request):
        self.requests.append(request)
        known = list(request.resumed_token_ids)
        made = []
        while not made or made[-1] != EOS:
            made.append(self.next_after(known + made))
        limit = request.sampling.max_tokens - len(known)
        reason = FinishReason.LENGTH if len(made) > limit else FinishReason.STOP
        made, outputs = made[:limit], []
        while made:
            size = self.sizes()
            outputs.append(StepOutput(request.request_id, made[:size]))
            made = made[size:]
        outputs[-1].finish_reason = reason
        return outputs

    def next_after(self, known):
        if self.begins and not known:
            return BEGIN
        if END not in known:
            thought = len(known) - self.begins
            return END if thought == self.ends_at else 20 + thought
        behind = len(known) - known.index(END)
        return EOS if behind > 4 else 50 + behind


def run(model, budget, *, is_open, max_tokens=100):
    plan = ThinkingPlan(budget, b"<t>", b"</t>", END_IDS, is_open, Pieces())
    backend = FakeBackend(model)
    spec = GenerateRequest("r", [5, 6], SamplingParams(max_tokens=max_tokens))

    async def read():
        stream = await BudgetedBackend(plan, backend).submit(spec, RequestContext())
        outputs = [output async for output in stream]
        await stream.aclose()
        return outputs

    outputs = asyncio.run(read())
    assert backend.num_live == 0
    assert [output.finish_reason is None for output in outputs] == [True] * (len(outputs) - 1) + [
        False
    ]
    tokens = [token_id for output in outputs for token_id in output.token_ids]
    return tokens, outputs[-1].finish_reason


@pytest.mark.parametrize("is_open", [True, False])
@pytest.mark.parametrize("budget", [0, 1, 5, 11, 12, 13, 40])
def test_the_end_is_said_after_so_many_tokens_and_the_model_goes_on(is_open, budget):
    chance = random.Random(budget)
    said = set()
    for sizes in (lambda: 1, lambda: 7, lambda: 100, lambda: chance.randrange(1, 5)):
        model = Model(12, begins=not is_open, sizes=sizes)
        tokens, reason = run(model, budget, is_open=is_open)
        said.add((tuple(tokens), reason))
        seeds = {request.sampling.seed for request in model.requests}
        assert len(seeds) == 1
        assert None not in seeds
    ((tokens, reason),) = said
    lead = () if is_open else (BEGIN,)
    thought = tuple(range(20, 20 + min(budget, 12)))
    # The mark itself is the thirteenth token of the thinking.
    end = (END,) if budget > 12 else END_IDS
    assert tokens == (*lead, *thought, *end, 51, 52, 53, 54, EOS)
    assert reason is FinishReason.STOP


def test_who_does_not_think_is_left_alone():
    class Silent(Model):
        def next_after(self, known):
            return EOS if len(known) > 20 else 30 + len(known)

    model = Silent(0, begins=False, sizes=lambda: 3)
    tokens, _ = run(model, 2, is_open=False)
    assert tokens == [*range(30, 51), EOS]
    assert len(model.requests) == 1


@pytest.mark.parametrize(("max_tokens", "num_said"), [(5, 5), (6, 6), (7, 7), (4, 4)])
def test_the_longest_length_counts_what_is_said_for_the_model(max_tokens, num_said):
    tokens, reason = run(
        Model(12, begins=False, sizes=lambda: 1), 4, is_open=True, max_tokens=max_tokens
    )
    assert tokens == [20, 21, 22, 23, *END_IDS, 51][:num_said]
    assert reason is FinishReason.LENGTH


def test_a_stream_that_nobody_reads_on_is_ended():
    plan = ThinkingPlan(3, b"<t>", b"</t>", END_IDS, True, Pieces())
    backend = FakeBackend(Model(12, begins=False, sizes=lambda: 1))
    spec = GenerateRequest("r", [5], SamplingParams(max_tokens=50))

    async def read():
        stream = await BudgetedBackend(plan, backend).submit(spec, RequestContext())
        for _ in range(6):
            await anext(stream)
        await stream.aclose()

    asyncio.run(read())
    assert backend.num_live == 0
    assert len(backend.requests) == 2
    assert backend.requests[1].resumed_token_ids == [20, 21, 22, *END_IDS]
