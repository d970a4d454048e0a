"""What build_app makes of several models; nothing is deployed."""

from service.app import build_app
from service.config import parse_config


def deployments_of(data):
    """By name; the ingress comes first."""
    ingress = build_app(parse_config(data))._bound_deployment
    _, _, *engines = ingress.init_args
    return {one.name: one for one in (ingress, *(engine._bound_deployment for engine in engines))}


def test_the_single_form_is_an_engine_and_an_ingress():
    assert list(deployments_of({})) == ["Ingress", "Engine"]


def test_each_model_has_replicas_of_its_own_behind_the_same_ingresses():
    made = deployments_of(
        {
            "num_ingresses": 2,
            "models": {
                "small": {"replica": {"cpus_per_rank": 0.5}},
                "org/large": {
                    "engine": {"tp_size": 2, "device": "cpu"},
                    "num_replicas": 3,
                    "replica": {"health_check_period_s": 5},
                },
            },
        }
    )
    assert list(made) == ["Ingress", "Engine-small", "Engine-org_large"]
    small, large = made["Engine-small"], made["Engine-org_large"]
    assert (small.num_replicas, large.num_replicas, made["Ingress"].num_replicas) == (1, 3, 2)
    assert small.ray_actor_options["num_cpus"] == 0.5
    assert len(large._replica_config.placement_group_bundles) == 2
    assert small._replica_config.placement_group_bundles is None
    periods = [one._deployment_config.health_check_period_s for one in (small, large)]
    assert periods == [1, 5]
