"""What a change of values reaches: KubeRay replaces a cluster by a second one, with as many GPUs
again, unless the cluster's specification is the same or has worker groups more at its end."""

import copy

import yaml

from tests.helm.objects import cluster_of, of_kind, one_of

A, B = {"name": "a"}, {"name": "b", "metricsPort": 9401}
C = {"name": "c", "metricsPort": 9402}
SCALER = {"autoscaler": {"enabled": True}}
COUNTS = ("replicas", "minReplicas", "maxReplicas")


def specification(renderer, *groups, **values):
    """The cluster as KubeRay's hash sees it: without numbers of pods and without tolerations."""
    cluster = copy.deepcopy(cluster_of(renderer.render([{"engineGroups": [*groups], **values}])))
    for group in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]:
        group["template"]["spec"].pop("tolerations", None)
        for name in COUNTS:
            group.pop(name, None)
    return cluster


def applications(objects):
    config = yaml.safe_load(one_of(objects, "RayService")["spec"]["serveConfigV2"])
    return {one["name"]: one for one in config["applications"]}


def test_another_group_adds_to_the_end_and_changes_nothing_before(renderer):
    before, after = specification(renderer, A), specification(renderer, A, B)
    added = after["workerGroupSpecs"][len(before["workerGroupSpecs"]) :]
    assert [group["groupName"] for group in added] == ["b-engine", "b-ingress"]
    del after["workerGroupSpecs"][len(before["workerGroupSpecs"]) :]
    assert after == before


def test_a_group_that_is_disabled_leaves_the_cluster_as_it_is(renderer):
    off = {**B, "enabled": False}
    before = specification(renderer, A, B, C, **SCALER)
    assert specification(renderer, A, off, C, **SCALER) == before
    objects = renderer.render([{"engineGroups": [A, off, C], **SCALER}])
    assert set(applications(objects)) == {"a", "c"}
    services = {one["metadata"]["name"] for one in of_kind(objects, "Service")}
    assert "tessera-b" not in services
    pods = {one["groupName"]: one["replicas"] for one in cluster_of(objects)["workerGroupSpecs"]}
    assert pods["b-engine"] == pods["b-ingress"] == 0


def test_other_groups_do_not_move_when_one_is_removed(renderer):
    """What one application says must not depend on its place: changed arguments restart it."""
    with_all = applications(renderer.render([{"engineGroups": [A, B, C]}]))
    without_first = applications(renderer.render([{"engineGroups": [B, C]}]))
    alone = applications(renderer.render([{"engineGroups": [C]}]))
    assert with_all["b"] == without_first["b"]
    assert with_all["c"] == without_first["c"] == alone["c"]


def test_bounds_reach_a_cluster_that_runs(renderer):
    """KubeRay would keep the pods' own bounds for ever, so they must not be in the way."""

    def scaled(least, most, replicas):
        scaling = {"enabled": True, "minReplicas": least, "maxReplicas": most}
        group = {"name": "a", "replicas": replicas, "autoscaling": scaling}
        return renderer.render([{"engineGroups": [group], **SCALER}])

    before, after = scaled(1, 2, 1), scaled(0, 40, 40)
    for engine, ingress in (cluster_of(one)["workerGroupSpecs"] for one in (before, after)):
        assert (engine["minReplicas"], engine["maxReplicas"]) == (0, 1000)
        assert (ingress["minReplicas"], ingress["maxReplicas"]) == (0, 1000)
    (engine, _) = applications(after)["a"]["deployments"]
    assert engine["autoscaling_config"]["min_replicas"] == 0
    assert engine["autoscaling_config"]["max_replicas"] == 40


def test_a_fixed_number_reaches_a_cluster_with_an_autoscaler_too(renderer):
    few, many = (
        {"name": "a", "replicas": count, "ingress": {"replicas": count}} for count in (1, 9)
    )
    assert specification(renderer, few, **SCALER) == specification(renderer, many, **SCALER)
    objects = renderer.render([{"engineGroups": [many], **SCALER}])
    for group in cluster_of(objects)["workerGroupSpecs"]:
        assert [group[name] for name in COUNTS] == [9, 0, 1000]
    assert [one["num_replicas"] for one in applications(objects)["a"]["deployments"]] == [9, 9]


def test_other_tolerations_reach_a_cluster_that_runs(renderer):
    """KubeRay 1.6 leaves them out of its hash: by themselves they would be lost without a word."""
    toleration = {"key": "nvidia.com/gpu", "operator": "Exists"}
    before = specification(renderer, A)
    assert specification(renderer, {**A, "tolerations": [toleration]}) != before
    assert specification(renderer, A, head={"tolerations": [toleration]}) != before
    assert specification(renderer, {**A, "ingress": {"tolerations": [toleration]}}) != before


def test_without_an_autoscaler_pods_are_as_many_as_replicas(renderer):
    objects = renderer.render([{"engineGroups": [{"name": "a", "replicas": 3}]}])
    engine, ingress = cluster_of(objects)["workerGroupSpecs"]
    assert [engine[name] for name in COUNTS] == [3, 3, 3]
    assert [ingress[name] for name in COUNTS] == [1, 1, 1]


def test_the_rayservice_takes_annotations(renderer):
    given = {"ray.io/anything": "yes"}
    objects = renderer.render([{"rayService": {"annotations": given}}])
    assert one_of(objects, "RayService")["metadata"]["annotations"] == given


def kept(objects):
    policy = "helm.sh/resource-policy"
    return {
        (one["kind"], one["metadata"]["name"])
        for one in objects
        if one["metadata"].get("annotations", {}).get(policy) == "keep"
    }


def test_with_redis_the_clean_up_of_an_uninstalled_cluster_finds_what_its_pod_needs(renderer):
    """KubeRay makes that Job's pod of the head's: account, mounted ConfigMap, network policy."""
    redis = {"ray": {"faultTolerance": {"redisAddress": "redis:6379"}}}
    objects = renderer.render([redis, {"serviceAccount": {"annotations": {"mine": "1"}}}])
    head = cluster_of(objects)["headGroupSpec"]["template"]["spec"]
    needed = {("ServiceAccount", head["serviceAccountName"]), ("NetworkPolicy", "tessera")}
    needed |= {
        ("ConfigMap", volume["configMap"]["name"])
        for volume in head["volumes"]
        if "configMap" in volume
    }
    assert kept(objects) == needed
    assert one_of(objects, "ServiceAccount")["metadata"]["annotations"]["mine"] == "1"
    assert kept(renderer.render()) == set()
