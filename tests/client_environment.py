"""An environment for clients that cannot be installed beside this project's own packages.

    python -m tests.client_environment        # makes it, unless it is there already

It lies in <venv>/tools/clients, has the packages of tests/clients/requirements.txt, and sees those
of this environment behind them (torch, Transformers), which it need not have twice. Where it cannot
be made, tests that need it are skipped.
"""

import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
REQUIREMENTS = ROOT / "tests" / "clients" / "requirements.txt"
FOLDER = Path(sys.prefix) / "tools" / "clients"
_STAMP = FOLDER / "requirements.txt"


def client_python() -> Path:
    """Its interpreter; skips the test that asks where it was not made."""
    if not _is_made():
        pytest.skip("no environment for clients (make tools)")
    return FOLDER / "bin" / "python"


def make() -> None:
    """Raises CalledProcessError where packages cannot be had."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    venv.create(FOLDER, with_pip=False, symlinks=True)
    own = Path(sysconfig.get_path("purelib", vars={"base": str(FOLDER)}))
    (own / "behind.pth").write_text(sysconfig.get_path("purelib") + "\n")
    # The file names every package: nothing is left to resolve.
    command = [FOLDER / "bin" / "python", "-m", "pip", "install", "--quiet", "--no-compile"]
    subprocess.run([*command, "--no-deps", "--requirement", REQUIREMENTS], check=True)
    shutil.copyfile(REQUIREMENTS, _STAMP)


def _is_made() -> bool:
    return _STAMP.exists() and _STAMP.read_text() == REQUIREMENTS.read_text()


def main() -> None:
    if not _is_made():
        try:
            make()
        except subprocess.CalledProcessError as error:
            print(f"clients: {error}. Their tests will be skipped.")
            return
    print(f"clients: {FOLDER}")


if __name__ == "__main__":
    main()
