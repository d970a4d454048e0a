"""Which model a name means, and what happens to names that mean none."""

import pytest

from service.api.errors import ApiError, ApiErrorCode
from service.handler.directory import ModelDirectory, ServedModel
from service.limits import Limits
from tests.fakes.text import RecordingMetrics, make_bench


@pytest.fixture
def refusals():
    return RecordingMetrics()


@pytest.fixture
def make(tmp_path, refusals):
    handler = make_bench(tmp_path).handler

    def make(*names):
        served = [ServedModel(name, handler, lambda: True) for name in names]
        return ModelDirectory(served, Limits(), refusals)

    return make


def error_of(call, *arguments):
    with pytest.raises(ApiError) as caught:
        call(*arguments)
    return caught.value


def test_a_name_picks_its_model_and_an_unknown_one_is_said_not_to_exist(make):
    models = make("small", "org/large")
    assert models.pick("org/large").name == "org/large"
    error = error_of(models.pick, "large")
    assert (error.code, error.param) == (ApiErrorCode.MODEL_NOT_FOUND, "model")
    assert "'large'" in error.message


def test_no_name_means_the_only_model_and_is_an_error_that_names_several(make):
    assert make("small").pick("").name == "small"
    error = error_of(make("small", "large").pick, "")
    assert (error.code, error.param) == (ApiErrorCode.INVALID_REQUEST, "model")
    assert "small, large" in error.message


def test_a_directory_of_one_model_knows_no_other(make):
    only = make("small", "large").only("large")
    assert [model.name for model in only] == ["large"]
    assert only.pick("").name == "large"
    assert error_of(only.pick, "small").code is ApiErrorCode.MODEL_NOT_FOUND
    assert error_of(make("small").only, "").code is ApiErrorCode.MODEL_NOT_FOUND


def test_a_long_unknown_name_is_cut_in_the_message(make):
    assert len(error_of(make("small").pick, "x" * 100_000).message) < 200


def test_refusals_count_with_their_code_and_go_on(make, refusals):
    models = make("small")
    with pytest.raises(ApiError), models.counting_refusals():
        models.pick("other")
    assert refusals.named("rejected") == ["model_not_found"]
