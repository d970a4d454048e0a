"""Where programs are looked for, and what is brought; with folders of the test's own."""

import platform
import subprocess

import pytest

from tests import programs


@pytest.fixture
def nowhere(tmp_path, monkeypatch):
    """No tools, no wheels, nothing on the PATH."""
    monkeypatch.setattr(programs, "TOOLS", tmp_path / "tools")
    monkeypatch.setattr(programs, "_WHEELS", {})
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    (tmp_path / "bin").mkdir()
    return tmp_path


def put_on_path(folder, name, script="exit 0"):
    program = folder / "bin" / name
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return program


def test_a_program_that_is_not_here_skips_whoever_needs_it(nowhere):
    assert programs.find("promtool") is None
    with pytest.raises(pytest.skip.Exception, match=r"no promtool \(make tools\)"):
        programs.needed("promtool")


def test_the_path_comes_last(nowhere):
    on_path = put_on_path(nowhere, "promtool")
    assert programs.find("promtool") == on_path
    (nowhere / "tools").mkdir()
    own = nowhere / "tools" / "promtool"
    own.write_text("")
    assert programs.find("promtool") == own


def test_an_environment_without_the_wheels_asks_the_path(nowhere, monkeypatch):
    def absent(name):
        raise programs.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(programs, "_WHEELS", {"helm": absent})
    assert programs.find("helm") is None
    on_path = put_on_path(nowhere, "helm")
    assert programs.find("helm") == on_path


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the wheels are for x86-64")
@pytest.mark.parametrize(("name", "flag"), [("helm", "version"), ("redis-server", "--version")])
def test_the_dev_extra_brings_programs_that_run(name, flag, tmp_path, monkeypatch):
    monkeypatch.setattr(programs, "TOOLS", tmp_path)
    monkeypatch.setenv("PATH", "")
    found = programs.find(name)
    assert found == tmp_path / name
    done = subprocess.run([found, flag], capture_output=True, check=False)
    assert done.returncode == 0
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_debians_package_is_unpacked_and_not_installed(nowhere):
    log = nowhere / "log"
    put_on_path(nowhere, "apt-get", f'echo "$@" >> {log}; echo > prometheus_1.deb')
    unpack = 'PATH=/usr/bin:/bin; mkdir -p "$3/usr/bin"; cd "$3/usr/bin"; touch prometheus promtool'
    put_on_path(nowhere, "dpkg-deb", f'echo "$1" >> {log}; {unpack}')
    programs.bring_prometheus()
    assert log.read_text().splitlines() == ["--quiet download prometheus", "--extract"]
    assert {path.name for path in (nowhere / "tools").iterdir()} == {"prometheus", "promtool"}


def test_chromium_is_unpacked_with_the_libraries_that_are_missing_and_finds_them(nowhere):
    log = nowhere / "log"
    folder = "${3#Dir::Cache::archives=}"
    put_on_path(nowhere, "apt-get", f'echo "$@" >> {log}; echo > "{folder}/chromium_1.deb"')
    chromium = '"$3/usr/lib/chromium/chromium-headless-shell"'
    says = r"printf '#!/bin/sh\necho $LD_LIBRARY_PATH $@'"
    folders = '"$3/usr/lib/chromium" "$3/usr/lib/x86_64-linux-gnu" "$3/usr/share"'
    unpack = f"mkdir -p {folders}; {says} > {chromium}; chmod +x {chromium}"
    put_on_path(nowhere, "dpkg-deb", f"PATH=/usr/bin:/bin; {unpack}")
    programs.bring_chromium()
    (asked,) = log.read_text().splitlines()
    assert "--download-only" in asked
    assert asked.endswith(" install chromium-headless-shell")
    found = programs.find("chromium")
    assert found == nowhere / "tools" / "chromium"
    done = subprocess.run(
        [found, "--headless"], env={"PATH": "/usr/bin:/bin"}, capture_output=True, check=True
    )
    libraries, flag = done.stdout.decode().split()
    assert str(nowhere / "tools" / "chromium.d" / "usr/lib/x86_64-linux-gnu") in libraries
    assert flag == "--headless"
    assert not (nowhere / "tools" / "chromium.d" / "usr/share").exists()


def test_what_cannot_be_fetched_is_said(nowhere):
    with pytest.raises(programs.ProgramMissingError, match="no apt-get"):
        programs.bring_prometheus()
    put_on_path(nowhere, "apt-get", "echo 'no such package' >&2; exit 100")
    put_on_path(nowhere, "dpkg-deb")
    for bring in (programs.bring_prometheus, programs.bring_chromium):
        with pytest.raises(programs.ProgramMissingError, match="no such package"):
            bring()
