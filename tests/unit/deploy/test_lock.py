"""The lock file of the image for GPUs: whole, by hash, and of what the project asks for."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LOCK_FILE = ROOT / "deploy" / "requirements.lock"
LOCK = LOCK_FILE.read_text()
ENTRY = re.compile(
    r"^([a-z0-9-]+)==(\S+) \\\n((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", re.M
)
VERSIONS = {name: version for name, version, _ in ENTRY.findall(LOCK)}
IMAGE = {
    "python_version": "3.12",
    "python_full_version": "3.12.3",
    "sys_platform": "linux",
    "platform_system": "Linux",
    "platform_machine": "x86_64",
    "implementation_name": "cpython",
    "platform_python_implementation": "CPython",
    "os_name": "posix",
}
# What the packages of the cuda extra are imported as.
IMPORTED_AS = {"torch": "torch", "sglang-kernel": "sgl_kernel"}


def canonical(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def asked_for():
    extras = PROJECT["optional-dependencies"]
    texts = [*PROJECT["dependencies"], *extras["cuda"], *extras["tracing"]]
    return [Requirement(text) for text in texts]


def test_it_holds_nothing_but_versions_with_hashes():
    assert ENTRY.sub("", LOCK) == ""
    assert len(VERSIONS) > 100


@pytest.mark.parametrize("requirement", asked_for(), ids=str)
def test_what_the_project_asks_for_is_in_it(requirement):
    if requirement.marker is None or requirement.marker.evaluate(IMAGE):
        assert requirement.specifier.contains(VERSIONS[canonical(requirement.name)])


def test_the_image_for_gpus_installs_it_and_nothing_else():
    text = (ROOT / "Dockerfile").read_text()
    gpu = text.partition('if [ "$EXTRAS" = cuda ]')[2].partition("else")[0]
    installs = re.findall(r"pip install ([^\\\n;]+)", gpu)
    assert [one.strip() for one in installs] == [
        "--require-hashes --no-deps --only-binary :all: -r requirements.lock",
        "--no-deps --no-build-isolation .",
    ]
    # The second needs the build's own package in place.
    assert "setuptools" in VERSIONS


def test_other_images_take_its_versions():
    (script,) = re.findall(r"sed -n '(\S.*?)' requirements.lock", (ROOT / "Dockerfile").read_text())
    done = subprocess.run(
        ["sed", "-n", script, LOCK_FILE], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [f"{name}=={version}" for name, version in VERSIONS.items()]


@pytest.mark.parametrize("text", PROJECT["optional-dependencies"]["cuda"])
def test_the_cuda_extra_holds_only_what_is_imported(text):
    module = IMPORTED_AS[Requirement(text).name]
    pattern = re.compile(rf"^\s*(?:import|from) {module}\b|\"{module}(?:\.\w+)?\"", re.M)
    files = [path for folder in ("attention", "workers") for path in (ROOT / folder).rglob("*.py")]
    assert any(pattern.search(path.read_text()) for path in files)
