"""What `tessera serve` says once it serves: where it listens, and a command to try the first model.

Knows the terminal and what models are for; asks nothing of the service.
"""

import json
import shlex
from collections.abc import Mapping
from typing import Any

from rich.console import Console

from service.config import ServeConfig
from service.deployments.listeners import host_and_port
from service.handler.task import Task

_TEXT = "Paris is the capital of France."
_JSON_HEADER = "-H 'Content-Type: application/json'"
_EXAMPLES: Mapping[Task, tuple[str, Mapping[str, Any]]] = {
    Task.GENERATE: ("/v1/completions", {"prompt": "def __init__(self", "max_tokens": 32}),
    Task.EMBED: ("/v1/embeddings", {"input": _TEXT}),
    Task.SCORE: (
        "/v1/rerank",
        {"query": "What is the capital of France?", "documents": [_TEXT, "Cats sleep a lot."]},
    ),
    Task.CLASSIFY: ("/pooling", {"input": _TEXT, "task": "classify"}),
}


def announce(config: ServeConfig, tasks: Mapping[str, Task], console: Console) -> None:
    """tasks: of models by name, as far as they are known."""
    url = f"{_scheme(config)}://{host_and_port(config.http.host, config.http.port)}"
    names = [model.name for model in config.served_models()]
    lines = (
        f"Tessera serves {', '.join(names)}",
        f"  HTTP     {url}/v1",
        *([f"  page     {url}/"] if config.http.has_page else []),
        f"  gRPC     {host_and_port(config.grpc.host, config.grpc.port)}",
        f"  metrics  http://{host_and_port(config.metrics.host, config.metrics.port)}/metrics",
        "",
        _command(config, url, names[0], tasks.get(names[0], Task.GENERATE)),
    )
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _scheme(config: ServeConfig) -> str:
    return "http" if config.http.tls is None else "https"


def _command(config: ServeConfig, url: str, model: str, task: Task) -> str:
    trust = "" if config.http.tls is None else " --cacert CA_FILE"
    has_keys = bool(config.auth.api_keys or config.auth.api_key_file)
    key = ' -H "Authorization: Bearer $API_KEY"' if has_keys else ""
    if task is Task.TRANSCRIBE:
        name = shlex.quote(f"model={model}")
        return f"curl{trust} {url}/v1/audio/transcriptions{key} -F {name} -F file=@speech.wav"
    path, fields = _EXAMPLES[task]
    body = shlex.quote(json.dumps({"model": model, **fields}))
    return f"curl{trust} {url}{path}{key} {_JSON_HEADER} -d {body}"
