"""Renders the chart for tests, with Helm.

`python -m tests.helm.rendering` writes the golden files anew. Knows no assertion.
"""

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.programs import find, reason_for

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CHART = ROOT / "helm" / "tessera"
GOLDEN = HERE / "golden"
CI_VALUES = sorted((CHART / "ci").glob("*-values.yaml"))
RELEASE = "tessera"

_CHANGING_FILES = ("dashboards", "rules", "files")
_NO_CLUSTER = {"KUBECONFIG": "/dev/null", "PATH": "/usr/bin:/bin"}
# Half of what Helm computes is collecting garbage: a run makes 60 MB of it and ends.
_NO_COLLECTOR = {"GOGC": "off"}

Values = Sequence[Path | Mapping[str, Any]]


class RenderError(Exception):
    """The chart refused its values; the text is Helm's own."""


@dataclass(frozen=True)
class Renderer:
    """helm: the program. It never asks a cluster."""

    helm: Path

    def render(
        self, values: Values = (), chart: Path = CHART, flags: Sequence[str] = ()
    ) -> list[dict[str, Any]]:
        """All objects, hooks included, without the notes. Later values win. Raises RenderError."""
        text = self._run(["template", RELEASE, str(chart), *flags], values)
        documents = yaml.load_all(text, Loader=yaml.CSafeLoader)
        return [document for document in documents if document]

    def notes(self, values: Values = ()) -> str:
        """What Helm prints after an installation. Raises RenderError."""
        return self._run(["install", RELEASE, str(CHART), "--dry-run=client"], values)

    def lint(self, values: Values = ()) -> str:
        """Helm's own opinion; warnings are errors. Raises RenderError."""
        return self._run(["lint", "--strict", str(CHART)], values)

    def package(self, folder: Path) -> Path:
        """The chart as the one file that is published."""
        self._run(["package", str(CHART), "--destination", str(folder)], ())
        (archive,) = folder.glob("*.tgz")
        return archive

    def _run(self, command: Sequence[str], values: Values) -> str:
        with tempfile.TemporaryDirectory() as folder:
            flags = []
            for index, one in enumerate(values):
                path = one if isinstance(one, Path) else Path(folder) / f"{index}.yaml"
                if not isinstance(one, Path):
                    path.write_text(yaml.safe_dump(dict(one)))
                flags += ["-f", str(path)]
            done = subprocess.run(
                [self.helm, *command, *flags],
                capture_output=True,
                text=True,
                check=False,
                env={**_NO_CLUSTER, **_NO_COLLECTOR, "HOME": folder},
            )
        if done.returncode:
            raise RenderError(done.stderr.strip() + done.stdout)
        return done.stdout


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


def write_golden_files(renderer: Renderer) -> None:
    with tempfile.TemporaryDirectory() as folder:
        chart = chart_with_stub_files(Path(folder))
        for values in CI_VALUES:
            text = golden_text(renderer.render([values], chart))
            golden_file(values).write_text(text)


if __name__ == "__main__":
    helm = find("helm")
    if helm is None:
        sys.exit(reason_for("helm"))
    write_golden_files(Renderer(helm))
