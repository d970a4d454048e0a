"""Which model a name means, and what happens to names that mean none."""

import asyncio

import pytest

from service.errors import ApiError, ApiErrorCode
from service.handler.directory import ModelDirectory, ServedModel
from service.limits import Limits
from service.observability.request_log.record import RequestRecord
from service.security.callers import Caller
from tests.fakes.text import RecordingMetrics, make_bench


@pytest.fixture
def refusals():
    return RecordingMetrics()


@pytest.fixture
def bench(tmp_path):
    return make_bench(tmp_path)


@pytest.fixture
def make(bench, refusals):
    def make(*names):
        served = [ServedModel(name, bench.handler, lambda: True, name) for name in names]
        return ModelDirectory(served, Limits(), refusals)

    return make


def error_of(call, *arguments):
    with pytest.raises(ApiError) as caught:
        call(*arguments)
    return caught.value


def test_a_name_picks_its_model_and_an_unknown_one_is_said_not_to_exist(make):
    models = make("small", "org/large")
    record = RequestRecord()
    assert models.pick("org/large", record) is models.find("org/large").handler
    assert record.model == "org/large"
    error = error_of(models.pick, "large", RequestRecord())
    assert (error.code, error.param) == (ApiErrorCode.MODEL_NOT_FOUND, "model")
    assert "'large'" in error.message


def test_no_name_means_the_only_model_and_is_an_error_that_names_several(make):
    record = RequestRecord()
    make("small").pick("", record)
    assert record.model == "small"
    error = error_of(make("small", "large").pick, "", RequestRecord())
    assert (error.code, error.param) == (ApiErrorCode.INVALID_REQUEST, "model")
    assert "small, large" in error.message


def test_a_directory_of_one_model_knows_no_other(make):
    only = make("small", "large").only("large")
    assert [model.name for model in only] == ["large"]
    record = RequestRecord()
    only.pick("", record)
    assert record.model == "large"
    assert error_of(only.pick, "small", record).code is ApiErrorCode.MODEL_NOT_FOUND
    assert error_of(make("small").only, "").code is ApiErrorCode.MODEL_NOT_FOUND


def test_a_long_unknown_name_is_cut_in_the_message(make):
    assert len(error_of(make("small").pick, "x" * 100_000, RequestRecord()).message) < 200


def test_a_refusal_counts_once_for_its_model_or_for_none(make, refusals, bench):
    models = make("small")
    for record in (
        RequestRecord(),
        RequestRecord(model="small"),
        RequestRecord(error_code="invalid_json"),
        RequestRecord(error_code="overloaded", model="small"),
        RequestRecord(error_code="invalid_request", model="gone"),
        RequestRecord(error_code="replica_lost", model="small", is_accepted=True),
    ):
        models.count_refusal(record)
    assert refusals.named("rejected") == ["invalid_json", "invalid_request"]
    assert bench.metrics.calls == [("rejected", "overloaded")]


def test_requests_are_refused_unread_only_if_every_model_refuses(tmp_path, refusals):
    benches = [make_bench(tmp_path / name) for name in ("small", "large")]
    served = [ServedModel(name, benches[int(name)].handler, lambda: True, name) for name in "01"]
    models = ModelDirectory(served, Limits(), refusals)
    models.check_admission()
    benches[0].backend.is_full = True
    models.check_admission()
    benches[1].backend.is_full = True
    assert error_of(models.check_admission).code is ApiErrorCode.OVERLOADED
    assert error_of(models.only("0").check_admission).code is ApiErrorCode.OVERLOADED


class CountingQuota:
    def __init__(self):
        self.ended = []

    def admit(self):
        return self

    def cancel(self):
        self.ended.append("cancelled")


def test_what_fails_before_it_runs_gives_its_place_back(make):
    quota = CountingQuota()
    caller = Caller("a", quota)
    with make("small").admitting(caller) as lease:
        assert lease is quota
    assert quota.ended == []
    with pytest.raises(asyncio.CancelledError), make("small").admitting(caller):
        raise asyncio.CancelledError
    assert quota.ended == ["cancelled"]
