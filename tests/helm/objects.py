"""Ways to take rendered objects apart. Knows no value of the chart."""


def of_kind(objects, kind):
    return [one for one in objects if one["kind"] == kind]


def one_of(objects, kind, name=None):
    found = [one for one in of_kind(objects, kind) if name in (None, one["metadata"]["name"])]
    assert len(found) == 1, [one["metadata"]["name"] for one in found]
    return found[0]


def cluster_of(objects):
    return one_of(objects, "RayService")["spec"]["rayClusterConfig"]


def pods_of(objects):
    """Pod templates of the cluster, by role and group."""
    cluster = cluster_of(objects)
    groups = [("head", cluster["headGroupSpec"])]
    groups += [(group["groupName"], group) for group in cluster["workerGroupSpecs"]]
    return {name: group["template"] for name, group in groups}


def worker(objects, name):
    return pods_of(objects)[name]["spec"]


def ray_container(template):
    return template["spec"]["containers"][0]


def environment_of(spec):
    variables = spec["containers"][0]["env"]
    return {variable["name"]: variable.get("value") for variable in variables}
