"""The Dockerfile and its ignore file: stages, user, what goes in, agreement with other files."""

import fnmatch
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from service.config import ServeConfig

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
VALUES = yaml.safe_load((ROOT / "helm" / "tessera" / "values.yaml").read_text())
CHART = yaml.safe_load((ROOT / "helm" / "tessera" / "Chart.yaml").read_text())
DOCKERFILE = (ROOT / "Dockerfile").read_text()
BUILD_TOOLS = ("build-essential", "g++", "make", "cmake", "ninja", "git", "python3.12-venv", "pip")


def instructions():
    """(instruction, arguments) of the Dockerfile, comments dropped and lines joined."""
    text = (ROOT / "Dockerfile").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    return [tuple(line.split(None, 1)) for line in joined.splitlines() if line.strip()]


def stages():
    found = []
    for name, arguments in instructions():
        if name == "FROM":
            found.append([])
        if found:
            found[-1].append((name, arguments))
    return found


BUILD, FINAL = stages()


def commands(stage):
    return " ".join(arguments for name, arguments in stage if name == "RUN")


def test_the_last_stage_takes_only_the_environment_of_the_first():
    copies = [arguments for name, arguments in FINAL if name == "COPY"]
    assert copies == ["--from=build /opt/tessera /opt/tessera"]


def test_the_last_stage_has_no_build_tools():
    words = commands(FINAL).split()
    assert not set(words) & set(BUILD_TOOLS)


def test_a_compiler_is_there_only_for_triton():
    """Triton compiles launchers at run time; without the cuda extra there are no Triton layers."""
    before, condition, after = commands(FINAL).partition('if [ -n "$EXTRAS" ]')
    assert condition
    assert "gcc" in after.split("fi ")[0]
    assert "gcc" not in before + after.split("fi ", 1)[1]


@pytest.mark.parametrize(
    ("extras", "installed"), [("", {"tracing"}), ("cuda", {"tracing", "cuda"})]
)
def test_every_image_can_trace_and_only_one_for_gpus_has_cuda(extras, installed):
    (target,) = re.findall(r'--constraint versions.txt ("\.\[[^"]*")', commands(BUILD))
    shell = ["sh", "-c", f"echo {target}"]
    environment = {"EXTRAS": extras}
    words = subprocess.run(shell, env=environment, capture_output=True, text=True, check=True)
    names = set(words.stdout.strip().removeprefix(".[").removesuffix("]").split(","))
    assert names == installed
    assert names <= set(PROJECT["project"]["optional-dependencies"])


def test_it_runs_as_the_user_that_the_chart_expects():
    (user,) = [arguments for name, arguments in FINAL if name == "USER"]
    security = VALUES["podSecurityContext"]
    assert user == f"{security['runAsUser']}:{security['runAsGroup']}"
    assert FINAL.index(("USER", user)) > max(i for i, one in enumerate(FINAL) if one[0] == "RUN")


def test_it_starts_tessera_under_an_init():
    assert ("ENTRYPOINT", '["/usr/bin/tini", "--", "tessera"]') in FINAL
    assert "tini" in commands(FINAL)
    assert "tessera" in PROJECT["project"]["scripts"]


def test_it_names_the_ports_of_the_service():
    config = ServeConfig()
    ports = f"{config.http.port} {config.grpc.port} {config.metrics.port}"
    assert ("EXPOSE", ports) in FINAL


def copied_sources():
    copies = [arguments.split() for name, arguments in BUILD if name == "COPY"]
    return [source for words in copies for source in words[:-1]]


def test_everything_that_is_installed_is_copied():
    patterns = PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]
    packages = {pattern.rstrip("*") for pattern in patterns}
    assert packages <= set(copied_sources())
    assert PROJECT["project"]["readme"] in copied_sources()
    for name in PROJECT["project"]["license-files"]:
        assert name.split("/")[0] in copied_sources()


@pytest.mark.parametrize("source", copied_sources())
def test_what_is_copied_exists_and_is_not_ignored(source):
    assert (ROOT / source).exists()
    assert not is_ignored(source)


@pytest.mark.parametrize(
    "path", [".git", ".venv", ".env", "tests", "benchmarks", "deploy", "workers/__pycache__"]
)
def test_nothing_else_reaches_the_builder(path):
    assert is_ignored(path)


def is_ignored(path):
    """Docker's rule for these patterns: the last one that fits decides."""
    ignored = False
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        pattern = line.lstrip("!")
        names = [path, path.split("/")[0]]
        fits = any(fnmatch.fnmatch(name, pattern.removeprefix("**/")) for name in names)
        fits = fits or fnmatch.fnmatch(path.split("/")[-1], pattern.removeprefix("**/"))
        if fits:
            ignored = not line.startswith("!")
    return ignored


def test_versions_agree():
    version = PROJECT["project"]["version"]
    assert CHART["appVersion"] == version
    text = (ROOT / "Dockerfile").read_text() + (ROOT / "deploy" / "docker-compose.yaml").read_text()
    assert set(re.findall(r"tessera:(\d+\.\d+\.\d+)", text)) == {version}
    (ray,) = [one for one in PROJECT["project"]["dependencies"] if one.startswith("ray[")]
    minor = ".".join(VALUES["rayVersion"].split(".")[:2])
    assert f">={minor}," in ray


def bases():
    found = dict(re.findall(r"^ARG (\w*BASE)=(\S+)$", DOCKERFILE, flags=re.MULTILINE))
    assert set(found) == {"BASE", "BUILD_BASE"}
    return found


def test_images_are_pinned():
    for image in bases().values():
        assert re.search(r":\d", image)
    froms = re.findall(r"^FROM (\S+)", DOCKERFILE, flags=re.MULTILINE)
    assert set(froms) == {f"${{{name}}}" for name in bases()}


DIGEST = "sha256:" + "ab" * 32
FAKE_DOCKER = """#!/bin/sh
[ "$1 $2 $3" = "buildx imagetools inspect" ] || exit 9
echo "$ANSWER"
"""


@pytest.mark.parametrize(("answer", "succeeds"), [(DIGEST, True), ("<no value>", False)])
def test_a_build_can_name_its_bases_by_digest(answer, succeeds, tmp_path):
    docker = tmp_path / "docker"
    docker.write_text(FAKE_DOCKER)
    docker.chmod(0o755)
    done = subprocess.run(
        [ROOT / "deploy" / "pin_images.sh"],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "ANSWER": answer},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode == 0) == succeeds
    expected = [f"--build-arg {name}={image}@{DIGEST}" for name, image in bases().items()]
    assert done.stdout.splitlines() == (expected if succeeds else [])
