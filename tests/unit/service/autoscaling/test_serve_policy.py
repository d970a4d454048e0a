"""The policy in Serve's hands: configuration, pickling, asking without blocking."""

import json
import time
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import ray
from ray.serve.autoscaling_policy import _apply_autoscaling_config
from ray.serve.config import AutoscalingConfig

from service.autoscaling import serve_policy
from service.autoscaling.load import ModelLoad, ReplicaLoad
from service.autoscaling.serve_options import scaling_options
from service.autoscaling.serve_policy import EngineScalingPolicy, LoadFeed
from service.config import parse_config
from workers.errors import ConfigError

BUSY = ModelLoad((ReplicaLoad(num_requests=30),), is_known=True)
KWARGS = {
    "app_name": "app",
    "model": "builtin",
    "served_name": "builtin",
    "target_queued_tokens": 1000,
    "target_kv_usage": 0.8,
    "target_requests": 10,
}


class Registry:
    """A handle of the registry actor. answer: what the next call's future ends with, if anything"""

    def __init__(self, answer=None):
        self.answer = answer
        self.asked = []
        self.pushed = []
        self.load_for_policy = SimpleNamespace(remote=self._ask)
        self.push = SimpleNamespace(remote=self.pushed.append)

    def _ask(self, key, can_wake):
        self.asked.append((key, can_wake))
        future = Future()
        if isinstance(self.answer, Exception):
            future.set_exception(self.answer)
        elif self.answer is not None:
            future.set_result(self.answer)
        return SimpleNamespace(future=lambda: future)


@pytest.fixture
def registry(monkeypatch):
    made = Registry(BUSY)
    monkeypatch.setattr(ray, "get_actor", lambda name, namespace: made)
    return made


def context(config, *, running, target):
    return SimpleNamespace(
        deployment_name="Engine",
        current_num_replicas=running,
        target_num_replicas=target,
        capacity_adjusted_min_replicas=config.min_replicas,
        capacity_adjusted_max_replicas=config.max_replicas,
        total_num_requests=0.0,
        config=config,
        policy_state={},
    )


def serve_config(**autoscaling):
    config = parse_config({"app_name": "app", "autoscaling": {"max_replicas": 4, **autoscaling}})
    (model,) = config.served_models()
    return AutoscalingConfig(**scaling_options("app", model)["autoscaling_config"])


def test_serve_takes_the_options_and_pickles_the_policy():
    made = serve_config(min_replicas=0, target_requests=7)
    assert (made.min_replicas, made.max_replicas) == (0, 4)
    policy_class = made.policy.get_policy()
    assert policy_class.__name__ == "EngineScalingPolicy"
    kwargs = json.loads(json.dumps(made.policy.policy_kwargs))
    assert kwargs["target_requests"] == 7
    assert policy_class(**kwargs) is not None


def test_the_engines_own_limit_is_the_default_target():
    config = parse_config(
        {"engine": {"max_running_requests": 33}, "autoscaling": {"max_replicas": 2}}
    )
    (model,) = config.served_models()
    options = scaling_options("app", model)["autoscaling_config"]
    assert options["policy"]["policy_kwargs"]["target_requests"] == 33


def test_without_autoscaling_the_number_is_fixed():
    (model,) = parse_config({"num_replicas": 3}).served_models()
    assert scaling_options("app", model) == {"num_replicas": 3}


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"num_replicas": 2, "autoscaling": {"max_replicas": 3}}, "exclude each other"),
        ({"autoscaling": {}}, "autoscaling.max_replicas"),
        ({"autoscaling": {"min_replicas": 3, "max_replicas": 2}}, "min_replicas must not be more"),
        ({"autoscaling": {"max_replicas": 2, "target_kv_usage": 1.5}}, "target_kv_usage"),
        (
            {"models": {"a": {"num_replicas": 2, "autoscaling": {"max_replicas": 3}}}},
            "exclude each other",
        ),
    ],
)
def test_contradictions_are_refused_by_name(settings, problem):
    with pytest.raises(ConfigError, match=problem):
        parse_config(settings)


def decided(policy, asked):
    """What the policy says once the registry has answered."""
    policy(asked)
    time.sleep(serve_policy.POLL_INTERVAL_S * 1.1)
    return policy(asked)[0]


def test_while_the_load_is_not_known_the_target_stays(registry):
    registry.answer = None
    policy = EngineScalingPolicy(**KWARGS)
    assert decided(policy, context(serve_config(), running=2, target=2)) == 2
    assert len(registry.asked) == 1, "a question under way is not asked again"


def test_the_load_decides_and_the_registry_learns_that_the_model_may_wake(registry):
    policy = EngineScalingPolicy(**KWARGS)
    assert decided(policy, context(serve_config(min_replicas=0), running=1, target=1)) == 3
    assert registry.asked[0] == ("Engine builtin", True)
    assert registry.pushed, "the decision is told as metrics"


def test_serve_holds_a_decision_back(registry):
    policy = _apply_autoscaling_config(EngineScalingPolicy(**KWARGS))
    assert decided(policy, context(serve_config(upscale_delay_s=60.0), running=1, target=1)) == 1


def test_nothing_holds_the_first_replica_back(registry):
    registry.answer = ModelLoad(num_waiting_requests=1, num_waiting_tokens=1, is_known=True)
    policy = _apply_autoscaling_config(EngineScalingPolicy(**KWARGS))
    config = serve_config(min_replicas=0, upscale_delay_s=60.0)
    assert decided(policy, context(config, running=0, target=0)) == 1


def test_a_dead_registry_is_looked_up_anew_and_an_old_load_expires(registry):
    now_s = 0.0

    def latest(after_s=1.0):
        nonlocal now_s
        now_s += after_s
        return feed.latest("key", False)

    feed = LoadFeed("app-registry", lambda: now_s)
    assert latest() is None
    assert latest() == BUSY
    registry.answer = ray.exceptions.RayActorError()
    assert [latest() for _ in range(3)] == [BUSY] * 3, "a lost answer is no reason to forget"
    assert latest(serve_policy.LOAD_EXPIRES_AFTER_S) is None
    registry.answer = BUSY
    latest()
    assert latest() == BUSY


def test_without_a_registry_nothing_is_known_and_nothing_blocks(monkeypatch):
    def no_actor(name, namespace):
        raise ValueError(name)

    monkeypatch.setattr(ray, "get_actor", no_actor)
    feed = LoadFeed("app-registry")
    started_s = time.monotonic()
    assert feed.latest("key", False) is None
    assert time.monotonic() - started_s < 60
