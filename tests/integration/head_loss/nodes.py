"""Redis and Ray nodes as child processes of this one, each with ports and folders of its own.

A node that ends is gone with its folder, as a pod is. Knows neither Serve nor Tessera.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

HOST = "127.0.0.1"
GCS_PORT = 18600
DASHBOARD_PORT = 18601
_REDIS_PORT = 18602
_CLIENT_SERVER_PORT = 18603
_AGENT_PORT = 18610
_WORKER_PORTS = 20000
_WORKER_PORTS_PER_NODE = 500
_OBJECT_STORE_BYTES = 80 << 20
_REDIS_STARTS_S = 10.0
_PASSWORD = "of-tests"
# KubeRay gives workers this when the head's state is kept; Ray's own default is 60.
RECONNECT_TIMEOUT_S = 600
# Whatever asks for this is never on the head, even if it asks for no CPU.
WORKER_RESOURCES = {"worker": 1000}


class ChildProcess:
    """One child with a folder. Starting it again after it has ended makes the folder anew."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._process: subprocess.Popen[bytes] | None = None
        self.folder = Path()

    def start(self) -> None:
        # Paths of sockets below it must stay short.
        self.folder = Path(tempfile.mkdtemp(prefix=f"{self._name}-", dir="/tmp"))
        with (self.folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                self.command(),
                env={**os.environ, **self.environment()},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def command(self) -> list[str]:
        raise NotImplementedError

    def environment(self) -> dict[str, str]:
        return {}

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def family(self) -> list[psutil.Process]:
        """The process and all that it started; empty when it does not run."""
        if not self.is_running or self._process is None:
            return []
        process = psutil.Process(self._process.pid)
        return [process, *process.children(recursive=True)]

    def kill(self) -> None:
        """SIGKILL to the whole family, at once."""
        for process in self.family():
            try:
                process.send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess:
                continue
        if self._process is not None:
            self._process.wait()

    def remove(self) -> None:
        """Kill it, and its folder with it."""
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


class Redis(ChildProcess):
    """Keeps nothing on disk: its own loss is not what is tried here."""

    def __init__(self, program: str) -> None:
        super().__init__("redis")
        self._program = program

    def start(self) -> None:
        """Returns when it listens. Raises TimeoutError if it does not."""
        super().start()
        end_s = time.monotonic() + _REDIS_STARTS_S
        while not is_listening(_REDIS_PORT):
            if time.monotonic() > end_s:
                raise TimeoutError(f"Redis does not listen: {(self.folder / 'log').read_text()}")
            time.sleep(0.1)

    def command(self) -> list[str]:
        where = ["--bind", HOST, "--port", str(_REDIS_PORT), "--dir", str(self.folder)]
        return [self._program, *where, "--save", "", "--requirepass", _PASSWORD]


class RayNode(ChildProcess):
    """`ray start --block`. number: tells its ports from those of other nodes."""

    def __init__(self, name: str, number: int, num_cpus: int, settings: dict[str, str]) -> None:
        super().__init__(name)
        self.agent_port = _AGENT_PORT + number
        self._first_port = _WORKER_PORTS + number * _WORKER_PORTS_PER_NODE
        self._num_cpus = num_cpus
        self._settings = settings

    def command(self) -> list[str]:
        return [
            str(Path(sys.executable).parent / "ray"),
            "start",
            "--block",
            f"--num-cpus={self._num_cpus}",
            f"--object-store-memory={_OBJECT_STORE_BYTES}",
            f"--temp-dir={self.folder}",
            f"--dashboard-agent-listen-port={self.agent_port}",
            f"--min-worker-port={self._first_port}",
            f"--max-worker-port={self._first_port + _WORKER_PORTS_PER_NODE - 1}",
            *self.role(),
        ]

    def role(self) -> list[str]:
        return [f"--address={HOST}:{GCS_PORT}", f"--resources={json.dumps(WORKER_RESOURCES)}"]

    def environment(self) -> dict[str, str]:
        return self._settings


class Head(RayNode):
    """Ray's control plane, no replica. has_redis: whether its state outlives it."""

    def __init__(self, has_redis: bool) -> None:
        redis = {
            "RAY_REDIS_ADDRESS": f"{HOST}:{_REDIS_PORT}",
            "RAY_external_storage_namespace": "head-loss",
        }
        super().__init__("head", 0, 0, redis if has_redis else {})
        self._has_redis = has_redis

    def role(self) -> list[str]:
        options = [
            "--head",
            f"--port={GCS_PORT}",
            f"--dashboard-port={DASHBOARD_PORT}",
            f"--ray-client-server-port={_CLIENT_SERVER_PORT}",
        ]
        return [*options, f"--redis-password={_PASSWORD}"] if self._has_redis else options


def is_listening(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex((HOST, port)) == 0
