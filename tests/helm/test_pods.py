"""What is in the pods of each kind: resources, volumes, containers, probes."""

import asyncio
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.fakes.replica import FakeReplica
from tests.helm.objects import environment_of, pods_of, ray_container, worker
from tests.helm.rendering import CHART, RenderError

SINGLE_GPU = CHART / "ci" / "single-gpu-values.yaml"
TWO_RANKS = CHART / "ci" / "tp2-autoscaling-values.yaml"
LITTLE_DISK = {"limits": {"ephemeral-storage": "1Gi"}}
EXTRAS = {
    "extraEnv": [{"name": "MINE", "value": "1"}],
    "extraVolumes": [{"name": "mine", "emptyDir": {}}],
    "extraVolumeMounts": [{"name": "mine", "mountPath": "/mine"}],
    "initContainers": [{"name": "first", "image": "busybox"}],
    "sidecars": [{"name": "beside", "image": "busybox"}],
}


@pytest.mark.parametrize("path", [SINGLE_GPU, TWO_RANKS], ids=lambda path: path.stem)
def test_an_engine_gets_the_requests_and_limits_of_its_values_and_its_gpus(path, renderer):
    values = yaml.safe_load(path.read_text())
    group = values["engineGroups"][0]
    resources = ray_container(pods_of(renderer.render([path]))[f"{group['name']}-engine"])[
        "resources"
    ]
    gpus = group.get("tpSize", 1) * group["gpusPerRank"]
    for kind in ("requests", "limits"):
        assert resources[kind]["nvidia.com/gpu"] == gpus
        assert resources[kind]["memory"] == group["resources"][kind]["memory"]
    assert "cpu" not in resources["limits"]


def test_only_engine_nodes_need_the_folder_of_the_kernel_cache(renderer):
    """A hostPath of type Directory on a node without GPUs would keep the head from starting."""
    objects = renderer.render([{"kernelCache": {"type": "hostPath", "hostPath": "/disk"}}])
    for name, template in pods_of(objects).items():
        (cache,) = [one for one in template["spec"]["volumes"] if one["name"] == "kernel-cache"]
        assert ("hostPath" in cache) == (name == "builtin-engine"), name


def test_gpus_are_hidden_from_pods_that_ask_for_none(renderer):
    for name, template in pods_of(renderer.render([SINGLE_GPU])).items():
        hidden = environment_of(template["spec"]).get("NVIDIA_VISIBLE_DEVICES")
        assert hidden == (None if name.endswith("-engine") else "void"), name


def test_what_a_user_adds_is_in_every_kind_of_pod(renderer):
    values = {"engineGroupDefaults": {**EXTRAS, "ingress": EXTRAS}, "head": EXTRAS}
    for template in pods_of(renderer.render([values])).values():
        spec, container = template["spec"], ray_container(template)
        assert environment_of(spec)["MINE"] == "1"
        assert EXTRAS["extraVolumes"][0] in spec["volumes"]
        assert EXTRAS["extraVolumeMounts"][0] in container["volumeMounts"]
        assert spec["initContainers"] == EXTRAS["initContainers"]
        # KubeRay takes the first container as Ray's.
        assert container["name"].startswith("ray-")
        assert spec["containers"][1:] == EXTRAS["sidecars"]


def test_a_users_containers_run_before_the_download(renderer):
    """They may bring a certificate or a file of credentials that the download needs."""
    download = {"huggingFace": {"repository": "org/model"}}
    values = {
        "engineGroups": [{"name": "a", "model": download, **EXTRAS}],
        "weights": {"type": "emptyDir"},
    }
    names = [one["name"] for one in worker(renderer.render([values]), "a-engine")["initContainers"]]
    assert names == ["first", "fetch-weights"]


def test_every_container_bounds_its_local_disk(renderer):
    for template in pods_of(renderer.render([SINGLE_GPU])).values():
        for volume in template["spec"]["volumes"]:
            assert "emptyDir" not in volume or volume["emptyDir"].get("sizeLimit"), volume
        for container in template["spec"]["containers"]:
            assert "ephemeral-storage" in container["resources"]["limits"]
            assert "ephemeral-storage" in container["resources"]["requests"]


@pytest.mark.parametrize(
    ("values", "role"),
    [
        ({"tmp": {"sizeLimit": "40Gi"}}, "head"),
        ({"weights": {"type": "emptyDir", "emptyDir": {"sizeLimit": "1Ti"}}}, "engine"),
        (
            {
                "engineGroups": [
                    {"name": "a", "resources": {"limits": {"ephemeral-storage": "1Gi"}}}
                ]
            },
            "engine",
        ),
    ],
    ids=["tmp", "weights", "limit"],
)
def test_volumes_that_the_kubelet_would_evict_for_are_refused(values, role, renderer):
    with pytest.raises(RenderError, match=f"ephemeral-storage of the {role} pods"):
        renderer.render([values])


def engine_probe(renderer):
    container = ray_container(pods_of(renderer.render())["builtin-engine"])
    return container["readinessProbe"]["exec"]["command"]


def is_ready(command, folder, copy):
    """The probe's verdict with only the sockets below the folder: other tests have engines too."""
    *words, table = command
    lines = [line for line in Path(table).read_text().splitlines() if f" {folder}/" in line]
    copy.write_text("\n".join(lines) + "\n")
    return subprocess.run([*words, copy], check=False).returncode == 0


@pytest.mark.asyncio
async def test_an_engine_pod_is_ready_while_an_engine_with_weights_is_in_it(
    renderer, tmp_path, monkeypatch
):
    """The kubelet evicts the last loaded engine if one that still loads counts as available."""
    monkeypatch.setattr("tempfile.tempdir", "/tmp")
    command = engine_probe(renderer)
    copy = tmp_path / "unix"
    with FakeReplica() as replica:
        folder = Path(replica.address.unix_path).parent
        assert folder.parent == Path("/tmp")
        assert is_ready(command, folder, copy)
        _, writer = await asyncio.open_unix_connection(replica.address.unix_path)
        writer.close()
    assert not is_ready(command, folder, copy)


def test_an_engine_that_was_killed_is_not_ready(renderer, tmp_path):
    """The file of its socket stays; the kernel's list does not."""
    folder = Path(
        subprocess.check_output(["mktemp", "-d", "/tmp/tessera-XXXXXX"], text=True).strip()
    )
    script = (
        "import os, signal, socket, sys\n"
        "s = socket.socket(socket.AF_UNIX)\n"
        f"s.bind('{folder}/channel.sock')\n"
        "s.listen()\n"
        "print('up', flush=True)\n"
        "signal.pause()\n"
    )
    command = engine_probe(renderer)
    process = subprocess.Popen(["python3", "-c", script], stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout is not None
        process.stdout.readline()
        assert is_ready(command, folder, tmp_path / "unix")
        process.kill()
    assert (folder / "channel.sock").exists()
    assert not is_ready(command, folder, tmp_path / "unix")
    (folder / "channel.sock").unlink()
    folder.rmdir()


def test_only_the_ray_node_decides_whether_a_pod_lives_and_has_started(renderer):
    """An engine pod that no replica needs yet must not be killed for want of an engine."""
    for template in pods_of(renderer.render()).values():
        container = ray_container(template)
        for probe in ("startupProbe", "livenessProbe"):
            assert container[probe]["httpGet"] == {"path": "/api/healthz", "port": 52365}
        startup = container["startupProbe"]
        assert startup["periodSeconds"] * startup["failureThreshold"] >= 600
