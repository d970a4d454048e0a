"""Debian's packages, downloaded and unpacked into a folder: nothing is installed or started."""

import os
import shutil
import subprocess
from pathlib import Path


class ProgramMissingError(Exception):
    """A program that can be neither found nor brought. The text says what was tried."""


def unpack_debian_package(name: str, folder: Path, *, with_missing: bool) -> Path:
    """Unpack a package below `folder`; where.

    with_missing: with everything that it depends on and this machine lacks. Needs no root but for
    an outdated package list. Raises ProgramMissingError.
    """
    for program in ("apt-get", "dpkg-deb"):
        if shutil.which(program) is None:
            raise ProgramMissingError(f"no {program}: put {name} on the PATH")
    archives = folder / "archives"
    (archives / "partial").mkdir(parents=True)
    download = _download_with_missing if with_missing else _download
    downloaded = download(name, archives)
    if downloaded.returncode and os.geteuid() == 0 and _apt("update").returncode == 0:
        downloaded = download(name, archives)
    if downloaded.returncode:
        raise ProgramMissingError(f"apt-get failed: {downloaded.stderr.strip()}")
    unpacked = folder / "unpacked"
    for package in archives.glob("*.deb"):
        subprocess.run(["dpkg-deb", "--extract", package, unpacked], check=True)
    return unpacked


def _download(name: str, archives: Path) -> subprocess.CompletedProcess[str]:
    return _apt("download", name, cwd=archives)


def _download_with_missing(name: str, archives: Path) -> subprocess.CompletedProcess[str]:
    # Without a lock: the folder is this call's own, and nothing is installed.
    own_folder = ("-o", f"Dir::Cache::archives={archives}", "-o", "Debug::NoLocking=1")
    only = ("--yes", "--download-only", "--reinstall", "--no-install-recommends")
    return _apt(*own_folder, *only, "install", name)


def _apt(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = ["apt-get", "--quiet", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
