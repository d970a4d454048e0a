"""Ask a server of forks (forked_workers.py) for a Ray worker, in place of Python.

    python -I -S forked_worker_client.py SOCKET WORKER ARGUMENTS...

Imports little: it runs once a worker.
"""

import array
import json
import os
import socket
import sys


def ask(path: str, request: dict) -> None:
    """Return when the request was granted."""
    streams = array.array("i", [0, 1, 2])
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(path)
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, streams)
        server.sendmsg([json.dumps(request).encode()], [rights])
        if not server.recv(4):
            sys.exit(f"the server of forks at {path} ended")


def main() -> None:
    path, *arguments = sys.argv[1:]
    environment = dict(os.environ)
    request = {"arguments": arguments, "environment": environment, "folder": os.getcwd()}
    ask(path, request)
    ask(f"{path}.{environment['RAY_JOB_ID']}", request)


if __name__ == "__main__":
    main()
