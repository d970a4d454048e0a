"""One model or several: two ways to write it, one way to read it."""

import pytest

from service.config import ModelConfig, ServeConfig, load_config, parse_config
from workers.errors import ConfigError


def models_of(data) -> tuple[ModelConfig, ...]:
    return parse_config(data).served_models()


def test_the_single_form_is_one_model_named_after_its_folder(tmp_path):
    (model,) = models_of({"engine": {"model": str(tmp_path / "tiny")}, "num_replicas": 3})
    assert (model.name, model.deployment, model.num_replicas) == ("tiny", "Engine", 3)
    assert model.engine.served_model_name == "tiny"
    (builtin,) = ServeConfig().served_models()
    assert (builtin.name, builtin.deployment) == ("builtin", "Engine")


def test_the_single_form_can_give_its_model_another_name():
    (model,) = models_of({"engine": {"served_model_name": "org/gpt"}})
    assert (model.name, model.deployment) == ("org/gpt", "Engine")


def test_several_models_keep_their_order_and_each_its_own_settings():
    small, large, third = models_of(
        {
            "models": {
                "small": {"engine": {"max_context_len": 128}},
                "org/large": {"num_replicas": 2},
                "third": {"autoscaling": {"max_replicas": 4}},
            }
        }
    )
    assert (small.name, large.name) == ("small", "org/large")
    assert (small.deployment, large.deployment) == ("Engine-small", "Engine-org_large")
    assert (small.engine.max_context_len, large.engine.max_context_len) == (128, None)
    assert (small.num_replicas, large.num_replicas) == (1, 2)
    assert small.autoscaling is None
    assert third.autoscaling is not None
    assert small.engine.to_engine_config().served_model_name == "small"


def test_what_a_models_replica_leaves_out_comes_from_the_top():
    first, second = models_of(
        {
            "replica": {"cpus_per_rank": 3, "step_timeout_s": 7},
            "models": {"a": {"replica": {"cpus_per_rank": 0.5}}, "b": {}},
        }
    )
    assert (first.replica.cpus_per_rank, first.replica.step_timeout_s) == (0.5, 7)
    assert (second.replica.cpus_per_rank, second.replica.step_timeout_s) == (3, 7)


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"engine": {"page_size": 16}}, "engine and models exclude each other"),
        ({"num_replicas": 1}, "num_replicas and models"),
        ({"engine": {}, "autoscaling": {"max_replicas": 2}}, "engine, autoscaling and models"),
    ],
)
def test_the_two_forms_exclude_each_other(extra, named):
    with pytest.raises(ConfigError, match=named) as caught:
        parse_config({"models": {"a": {}}, **extra})
    assert "models.<name>" in str(caught.value)
    assert not str(caught.value).startswith(":")


def test_a_flag_for_the_only_model_does_not_go_unheard(tmp_path):
    file = tmp_path / "two.yaml"
    file.write_text("models: {a: {}, b: {}}")
    with pytest.raises(ConfigError, match="engine and models"):
        load_config(file, {}, {"engine.tp_size": 2})
    assert len(load_config(file, {}, {"http.port": 8001}).served_models()) == 2


@pytest.mark.parametrize(
    ("models", "message"),
    [
        ({"a": {"engin": {}}}, r"models\.a\.engin: no such setting"),
        ({"a": {"engine": {"tp_size": 0}}}, r"models\.a\.engine"),
        ({"a b": {}}, r"models\.a b"),
        ({"": {}}, "models"),
        ({"a": {"engine": {"served_model_name": "b"}}}, r"models\.a"),
        ({"a/b": {}, "a_b": {}}, "must differ"),
        ([], "models"),
    ],
)
def test_what_no_model_can_be_is_an_error_that_names_it(models, message):
    with pytest.raises(ConfigError, match=message):
        parse_config({"models": models})


def test_no_models_at_all_is_the_single_form():
    assert models_of({"models": {}}) == ServeConfig().served_models()
