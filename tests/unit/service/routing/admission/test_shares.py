"""Admission of several models: nobody is crowded out, and nothing is lost where nobody else is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.errors import ApiError, ApiErrorCode
from service.routing.admission import AdmissionSettings, IngressAdmission


def fill(model, num_prompt_tokens=1, limit=1000):
    """How many sequences the model can still have admitted."""
    for count in range(limit):
        try:
            model.admit(f"r{count}", num_prompt_tokens)
        except ApiError:
            return count
    return limit


def test_a_model_alone_has_all_there_is():
    (only,) = IngressAdmission(AdmissionSettings(max_live_requests=10)).models
    assert fill(only) == 10


def test_a_crowd_before_one_model_leaves_the_others_their_reserve():
    settings = AdmissionSettings(max_live_requests=40)
    ingress = IngressAdmission(settings, num_models=2)
    crowded, quiet = ingress.models
    assert fill(crowded) == 30
    assert fill(quiet) == 10
    assert ingress.num_live_requests == 40
    with pytest.raises(ApiError) as caught:
        crowded.check()
    assert caught.value.code is ApiErrorCode.OVERLOADED
    crowded.ledger.close("r0")
    crowded.check()


def test_prompt_tokens_are_shared_alike_and_one_prompt_of_any_length_is_taken():
    settings = AdmissionSettings(max_queued_tokens=400)
    crowded, quiet = IngressAdmission(settings, num_models=2).models
    assert fill(crowded, num_prompt_tokens=100) == 3
    assert fill(quiet, num_prompt_tokens=100) == 1
    quiet.ledger.start("r0")
    quiet.admit("long", 10_000)
    with pytest.raises(ApiError):
        quiet.admit("one more", 1)


def test_a_share_of_nothing_reserved_is_first_come_first_served():
    settings = AdmissionSettings(max_live_requests=8, reserved_share=0)
    first, late = IngressAdmission(settings, num_models=2).models
    assert (fill(first), fill(late)) == (8, 0)


def test_draining_is_of_the_whole_ingress():
    ingress = IngressAdmission(AdmissionSettings(), num_models=2)
    ingress.begin_drain()
    for model in ingress.models:
        with pytest.raises(ApiError) as caught:
            model.check()
        assert caught.value.code is ApiErrorCode.DRAINING


@given(
    max_live=st.integers(1, 50),
    share=st.floats(0, 1),
    turns=st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=200),
)
def test_the_ceiling_holds_and_every_reserve_can_be_had_at_any_time(max_live, share, turns):
    settings = AdmissionSettings(max_live_requests=max_live, reserved_share=share)
    ingress = IngressAdmission(settings, num_models=3)
    live = [[], [], []]
    for number, (index, is_arrival) in enumerate(turns):
        model = ingress.models[index]
        if is_arrival:
            try:
                model.admit(f"r{number}", 1)
            except ApiError:
                assert model.num_live_requests >= int(max_live * share / 3)
            else:
                model.ledger.start(f"r{number}")
                live[index].append(f"r{number}")
        elif live[index]:
            model.ledger.close(live[index].pop())
        assert ingress.num_live_requests <= max_live
