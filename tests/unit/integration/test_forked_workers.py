"""The server whose forks are Ray's workers in tests: a fork is what the program would have been."""

import json
import os
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.integration.forked_workers import CLIENT

ROOT = Path(__file__).parents[3]
# Says what it is, waits for a line, ends as its last argument says.
PROGRAM = """
import json, os, sys
print(json.dumps([os.getpid(), os.getpgid(0), sys.argv, os.getcwd(), dict(os.environ), __name__,
    sorted({"csv", "wave"} & sys.modules.keys())]))
sys.stdout.flush()
print(input(), file=sys.stderr)
sys.exit(int(sys.argv[-1]))
"""
SERVER = """
import sys
from tests.integration.forked_workers import JobServer
server = JobServer(sys.argv[1], ("csv",), sys.argv[2:])
print("listening", flush=True)
server.serve()
"""
PATIENCE_S = 60


@contextmanager
def fork_server(path, of_jobs="wave"):
    command = [sys.executable, "-c", SERVER, str(path), of_jobs]
    environment = {**os.environ, "OF_THE_SERVER": "1", "PYTHONPATH": str(ROOT)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env=environment, **pipes) as server:
        assert server.stdout.readline() == b"listening\n"
        yield server


def ask(path, job, program, folder, *arguments):
    """The client with pipes of its own: it ends when there is a worker, which has them."""
    environment = {"OF_THE_WORKER": "2", "RAY_JOB_ID": job, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-I", "-S", str(CLIENT), str(path), str(program), *arguments]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen(command, env=environment, cwd=folder, text=True, **pipes)


@pytest.fixture
def program(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    return tmp_path / "program.py"


def test_a_fork_is_what_the_program_would_have_been(tmp_path, program):
    path = tmp_path / "socket"
    with fork_server(path) as server:
        client = ask(path, "01", program, tmp_path, "an argument", "3")
        pid, group, argv, folder, environment, name, modules = json.loads(client.stdout.readline())
        assert client.wait(PATIENCE_S) == 0
        assert psutil.Process(pid).parent().ppid() == server.pid
        assert group == pid
        assert argv == [str(program), "an argument", "3"]
        assert (folder, name, modules) == (str(tmp_path), "__main__", ["csv", "wave"])
        assert environment["OF_THE_WORKER"] == "2"
        assert "OF_THE_SERVER" not in environment
        client.stdin.write("a line\n")
        client.stdin.close()
        assert client.stderr.readline() == "a line\n"
        # Reaped: a zombie would look alive.
        end_s = time.monotonic() + PATIENCE_S
        while psutil.pid_exists(pid):
            assert time.monotonic() < end_s
            time.sleep(0.01)
        server.stdin.close()
        assert server.wait(PATIENCE_S) == 0


def test_a_job_has_a_server_that_has_loaded_nothing_of_another(tmp_path, program):
    """Ray's library keeps the job that it found in the environment."""
    path = tmp_path / "socket"
    with fork_server(path) as server:
        clients = [ask(path, job, program, tmp_path, "0") for job in ("01", "02", "01")]
        said = [json.loads(client.stdout.readline()) for client in clients]
        parents = [psutil.Process(pid).ppid() for pid, *_ in said]
        assert parents[0] == parents[2] != parents[1]
        assert [environment["RAY_JOB_ID"] for *_, environment, _, _ in said] == ["01", "02", "01"]
        for client in clients:
            client.communicate("\n", timeout=PATIENCE_S)
        server.stdin.close()
        assert server.wait(PATIENCE_S) == 0


DRAWS = """
from concurrent.futures import ThreadPoolExecutor
import ray
draw = ray.ObjectRef.from_random
with ThreadPoolExecutor(1) as thread:
    print(draw().hex(), thread.submit(draw).result().hex(), flush=True)
"""


def test_workers_of_a_job_draw_ids_of_their_own(tmp_path):
    """Two that begin at once make an object each, of the first id that they draw; what another
    thread draws names its tasks."""
    path, program = tmp_path / "socket", tmp_path / "program.py"
    program.write_text(DRAWS)
    with fork_server(path, "ray.serve._private.controller") as server:
        clients = [ask(path, "01000000", program, tmp_path) for _ in range(3)]
        said = [client.communicate(timeout=PATIENCE_S)[0].split() for client in clients]
        server.stdin.close()
        assert server.wait(PATIENCE_S) == 0
    assert [len(ids) for ids in said] == [2, 2, 2]
    assert len({one for ids in said for one in ids}) == 6


def test_a_client_without_a_server_says_so(tmp_path, program):
    client = ask(tmp_path / "socket", "01", program, tmp_path)
    _, errors = client.communicate(timeout=PATIENCE_S)
    assert client.returncode != 0
    assert "No such file" in errors
