"""Renders the chart for tests: with the Go renderer beside this file, or with helm where it is.

`python -m tests.helm.rendering` writes the golden files anew. Knows no assertion.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CHART = ROOT / "helm" / "tessera"
GOLDEN = HERE / "golden"
CI_VALUES = sorted((CHART / "ci").glob("*-values.yaml"))

GOPATH = Path("/usr/share/gocode")
_GO_PACKAGES = ("github.com/Masterminds/sprig", "sigs.k8s.io/yaml")
_DEBIAN_PACKAGES = "golang-go golang-github-masterminds-sprig-dev golang-k8s-sigs-yaml-dev"
_CHANGING_FILES = ("dashboards", "rules", "files")


class RenderError(Exception):
    """The chart refused its values; the text is the template's own."""


@dataclass(frozen=True)
class Renderer:
    """binary: the built renderer."""

    binary: Path

    def render(
        self, values: Sequence[Path | Mapping[str, Any]] = (), chart: Path = CHART
    ) -> list[dict[str, Any]]:
        """All objects, without the notes. Later values win. Raises RenderError."""
        text = self.render_text(values, chart)
        parts = [part for part in text.split("---\n# Source: ") if part.strip()]
        objects: list[dict[str, Any]] = []
        for part in parts:
            name, _, body = part.partition("\n")
            if not name.endswith("NOTES.txt"):
                objects += [document for document in yaml.safe_load_all(body) if document]
        return objects

    def render_text(
        self, values: Sequence[Path | Mapping[str, Any]] = (), chart: Path = CHART
    ) -> str:
        """As `helm template` prints it, notes included. Raises RenderError."""
        with tempfile.TemporaryDirectory() as folder:
            flags = []
            for index, one in enumerate(values):
                path = one if isinstance(one, Path) else Path(folder) / f"{index}.yaml"
                if not isinstance(one, Path):
                    path.write_text(yaml.safe_dump(dict(one)))
                flags += ["-f", str(path)]
            done = subprocess.run(
                [str(self.binary), "-chart", str(chart), *flags], capture_output=True, text=True
            )
        if done.returncode:
            raise RenderError(done.stderr.strip())
        return done.stdout


def missing_for_go() -> str | None:
    """What keeps the renderer from being built, or None."""
    if shutil.which("go") is None:
        return f"go is not installed: apt-get install {_DEBIAN_PACKAGES}"
    for package in _GO_PACKAGES:
        if not (GOPATH / "src" / package).is_dir():
            return f"the Go package {package} is not there: apt-get install {_DEBIAN_PACKAGES}"
    return None


def build_renderer(folder: Path) -> Renderer:
    """Compile it into the folder. Raises subprocess.CalledProcessError."""
    binary = folder / "renderer"
    environment = {
        **os.environ,
        "GO111MODULE": "off",
        "GOPATH": str(GOPATH),
        "GOFLAGS": "",
        "GOCACHE": os.environ.get("GOCACHE", str(folder / "cache")),
    }
    subprocess.run(
        ["go", "build", "-o", str(binary), "main.go"],
        cwd=HERE / "renderer",
        env=environment,
        check=True,
    )
    return Renderer(binary)


def chart_with_stub_files(folder: Path) -> Path:
    """A copy of the chart whose dashboards, rules and scripts never change."""
    chart = folder / "tessera"
    shutil.copytree(CHART, chart)
    for name in _CHANGING_FILES:
        shutil.rmtree(chart / name, ignore_errors=True)
        (chart / name).mkdir()
    (chart / "dashboards" / "overview.json").write_text('{"title": "Overview"}\n')
    (chart / "rules" / "alerts.yaml").write_text(
        "groups:\n- name: tessera\n  rules:\n  - alert: Down\n    expr: up == 0\n"
    )
    (chart / "files" / "pre_stop.py").write_text('"""Stub."""\n')
    return chart


def golden_file(values: Path) -> Path:
    return GOLDEN / f"{values.name.removesuffix('-values.yaml')}.yaml"


def golden_text(objects: Sequence[Mapping[str, Any]]) -> str:
    """One canonical text: ordered by kind and name, keys sorted, long strings as blocks."""
    ordered = sorted(objects, key=lambda one: (one["kind"], one["metadata"]["name"]))
    return yaml.dump_all(ordered, Dumper=_BlockDumper, sort_keys=True, width=120)


class _BlockDumper(yaml.SafeDumper):
    """Strings of several lines as `|` blocks, and no anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_BlockDumper.add_representer(str, _represent_text)


def write_golden_files() -> None:
    with tempfile.TemporaryDirectory() as folder:
        renderer = build_renderer(Path(folder))
        chart = chart_with_stub_files(Path(folder))
        for values in CI_VALUES:
            text = golden_text(renderer.render([values], chart))
            golden_file(values).write_text(text)


if __name__ == "__main__":
    reason = missing_for_go()
    if reason is not None:
        sys.exit(reason)
    write_golden_files()
