"""How many ingress processes there are, and what HAProxy mode asks of them."""

import pytest

from service.config import parse_config
from service.deployments.ingress_processes import ingress_actor_options, num_ingresses


@pytest.mark.parametrize(
    ("num_cpus", "expected"), [(1.0, 1), (4.0, 1), (7.5, 1), (8.0, 2), (16.0, 4), (256.0, 4)]
)
def test_the_automatic_number_follows_the_clusters_cpus_up_to_four(num_cpus, expected):
    assert num_ingresses(parse_config({}), num_cpus) == expected


def test_a_configured_number_stands():
    assert num_ingresses(parse_config({"num_ingresses": 7}), 2.0) == 7


def test_without_ray_this_machines_cpus_count():
    assert 1 <= num_ingresses(parse_config({}), None) <= 4


@pytest.mark.parametrize(
    "auth",
    [
        {"api_keys": ["secret"], "limits": {"requests_per_minute": 10}},
        {"api_key_file": "/keys"},
    ],
)
def test_keys_that_may_have_limits_keep_one_process(auth):
    assert num_ingresses(parse_config({"auth": auth}), 64.0) == 1


def test_keys_without_limits_do_not():
    config = parse_config({"auth": {"api_keys": ["secret"]}})
    assert num_ingresses(config, 64.0) == 4


def test_haproxy_mode_runs_the_application_on_serves_own_thread():
    options = ingress_actor_options(parse_config({"http": {"proxy": "haproxy"}}))
    environment = options["runtime_env"]["env_vars"]
    assert environment == {"RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0"}


def test_direct_mode_asks_for_no_environment_of_its_own():
    assert ingress_actor_options(parse_config({})) == {"num_cpus": 0}
