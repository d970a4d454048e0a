"""Ray's workers as forks of a process that has imported what they need.

A service is a dozen processes, and each would import Ray, most FastAPI and gRPC, an engine torch
and transformers: most of the 20 s of CPU that a start takes. Here a server imports that once. What
Ray takes for Python is a program (forked_worker_client.py) that asks for a fork, which has the
environment, the folder, the arguments and the output of what it replaces.

Ray's library reads the job of a worker from the environment when it is loaded. So the server knows
no Ray; for each job it forks a second one, which imports Ray and forks the workers of that job.

A worker with a runtime environment starts as Ray starts it: what it sets may be read by an import.
Tests of `tessera serve` as a process fork nothing either.
"""

import array
import gc
import importlib
import json
import os
import runpy
import select
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn
from unittest import mock

CLIENT = Path(__file__).with_name("forked_worker_client.py")
ROOT = Path(__file__).parents[2]
# What an engine imports, and what Ray Serve and an ingress import of others.
BEFORE_RAY = (
    "fastapi",
    "grpc.aio",
    "uvicorn",
    "aiohttp",
    "service.api.http",
    "workers.engine.loop",
    "workers.engine.single_rank",
    "workers.parallel.tp_engine",
    "workers.models.transformers_model",
    "transformers.models.llama.modeling_llama",
)
WITH_RAY = (
    "ray.serve._private.controller",
    "ray.serve._private.replica",
    "service.deployments.ingress",
    "service.deployments.replica",
    "service.deployments.control_plane",
    "workers.parallel.ray_followers",
)
MAX_REQUEST_BYTES = 1 << 20
IDS_APART = 1000
"""Random ids that a worker's first thread draws in a test, at most."""
THREADS_APART = 64
"""Other threads of a worker that draw some, at most."""
STREAMS = (0, 1, 2)

# "arguments", "environment", "folder".
Request = dict[str, Any]


@contextmanager
def workers_are_forked() -> Iterator[None]:
    """A Ray that is started meanwhile has forked workers, as long as this lasts."""
    with TemporaryDirectory(prefix="forks-") as folder:
        path = Path(folder, "socket")
        server = subprocess.Popen(
            [sys.executable, "-m", "tests.integration.forked_workers", str(path)],
            cwd=ROOT,
            # A library of linear algebra would start threads when it is loaded.
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        with server:
            if not server.stdout.readline():
                raise RuntimeError(f"the server of forks ended with {server.wait()}")
            with mock.patch.object(sys, "executable", str(_launcher(Path(folder), path))):
                yield
            # Both kinds of server end with their standard input.
            server.stdin.close()


def _launcher(folder: Path, path: Path) -> Path:
    """What Ray takes for Python: workers are asked for, all else is Python's."""
    python, client, socket_path = (shlex.quote(str(one)) for one in (sys.executable, CLIENT, path))
    launcher = folder / "python"
    launcher.write_text(
        f'#!/bin/sh\ncase "$1" in\n*/default_worker.py) '
        f'exec {python} -I -S {client} {socket_path} "$@";;\n*) exec {python} "$@";;\nesac\n'
    )
    launcher.chmod(0o755)
    return launcher


class ForkServer:
    """Answers requests at a Unix socket, one after the other, until standard input ends.

    Has one thread, or its forks would lack the others, and no descriptor that a fork must keep.
    """

    def __init__(self, path: str, modules: Sequence[str]) -> None:
        for name in modules:
            importlib.import_module(name)
        num_threads = len(os.listdir("/proc/self/task"))
        assert num_threads == 1, f"a fork would lack {num_threads - 1} threads"
        self._path = path
        signal.signal(signal.SIGCHLD, reap)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen(64)
        gc.collect()
        gc.freeze()

    def serve(self) -> NoReturn:
        while 0 not in select.select([self._listener, 0], [], [])[0]:
            connection, _ = self._listener.accept()
            request, streams = received(connection)
            if self.takes(request) and not self.fork(request):
                connection.close()
                self._listener.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                self.become(request, streams)
                sys.exit(0)
            close(streams)
            connection.sendall(b"done")
            connection.close()
        # Without a last collection of all that is imported, which takes ten seconds.
        os._exit(0)

    def takes(self, request: Request) -> bool:
        """Whether a request needs a fork."""
        return True

    def fork(self, request: Request) -> int:
        """The child's pid, 0 in the child."""
        return os.fork()

    def become(self, request: Request, streams: Sequence[int]) -> None:
        """What the child of a request does until it ends."""
        raise NotImplementedError


class JobServer(ForkServer):
    """Forks a server of workers for each job."""

    def __init__(self, path: str, modules: Sequence[str], of_jobs: Sequence[str]) -> None:
        super().__init__(path, modules)
        self._modules_of_jobs = of_jobs
        self._jobs: set[str] = set()
        self._ready: tuple[int, int] = (-1, -1)

    def takes(self, request: Request) -> bool:
        return request["environment"]["RAY_JOB_ID"] not in self._jobs

    def fork(self, request: Request) -> int:
        """Return in this process when the server listens, or has ended."""
        self._ready = os.pipe()
        pid = os.fork()
        if pid:
            os.close(self._ready[1])
            os.read(self._ready[0], 1)
            os.close(self._ready[0])
            self._jobs.add(request["environment"]["RAY_JOB_ID"])
        return pid

    def become(self, request: Request, streams: Sequence[int]) -> None:
        close([*streams, self._ready[0]])
        take_environment(request)
        path = f"{self._path}.{os.environ['RAY_JOB_ID']}"
        workers = WorkerServer(path, self._modules_of_jobs)
        os.close(self._ready[1])
        workers.serve()


class WorkerServer(ForkServer):
    """Forks the workers of one job."""

    def fork(self, request: Request) -> int:
        draw_apart()
        return super().fork(request)

    def become(self, request: Request, streams: Sequence[int]) -> None:
        # Ray ends the process group of a worker.
        os.setpgid(0, 0)
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        close(streams)
        os.chdir(request["folder"])
        take_environment(request)
        sys.argv = request["arguments"]
        runpy.run_path(sys.argv[0], run_name="__main__")


def draw_apart() -> None:
    """Forks would draw the same random ids, as they have Ray's generator from their server: that of
    the main thread, and what seeds one for every other thread, in the order in which they begin. A
    worker begins by making an object of the first one, and of two that begin at once the second
    ends when it finds the object there, and whoever waits for the first workers of a job waits for
    ever. Tasks are named after an id of their thread: two callers of an actor whose tasks have the
    same name end it. So what the next fork draws is a good way on."""
    if "ray" in sys.modules:
        draw = sys.modules["ray"].ObjectRef.from_random
        for _ in range(IDS_APART):
            draw()
        for _ in range(THREADS_APART):
            thread = threading.Thread(target=draw)
            thread.start()
            thread.join()


def reap(number: int, frame: object) -> None:
    """A worker that ended must not look alive: Ray asks the kernel whether it is."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return


def received(connection: socket.socket) -> tuple[Request, list[int]]:
    """A request, and the standard streams that came with it."""
    space = socket.CMSG_SPACE(len(STREAMS) * array.array("i").itemsize)
    body, ancillary, _, _ = connection.recvmsg(MAX_REQUEST_BYTES, space)
    streams = array.array("i")
    for _, _, data in ancillary:
        streams.frombytes(data)
    return json.loads(body), list(streams)


def take_environment(request: Request) -> None:
    os.environ.clear()
    os.environ.update(request["environment"])


def close(numbers: Sequence[int]) -> None:
    for number in numbers:
        os.close(number)


if __name__ == "__main__":
    server = JobServer(sys.argv[1], BEFORE_RAY, WITH_RAY)
    print("listening", flush=True)
    # The number stays taken.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    server.serve()
