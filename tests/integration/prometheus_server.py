"""A real Prometheus that scrapes a running service every second, and ways to ask it."""

import json
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.integration.services import wait_until
from tests.programs import needed

JOB = "tessera"


@dataclass(frozen=True)
class Prometheus:
    """url: its root, without a slash at the end."""

    url: str

    def query(self, expression: str, at_s: float | None = None) -> list[dict]:
        """Series of an instant query, now or at a Unix time."""
        parameters = {"query": expression} | ({} if at_s is None else {"time": str(at_s)})
        return self._ask("query", parameters)["result"]

    def query_range(
        self, expression: str, start_s: float, end_s: float, step_s: float
    ) -> list[dict]:
        parameters = {"query": expression, "start": start_s, "end": end_s, "step": step_s}
        return self._ask("query_range", parameters)["result"]

    def label_values(self, selector: str, label: str) -> list[str]:
        return self._ask(f"label/{label}/values", {"match[]": selector})

    def rules(self) -> list[dict]:
        return [rule for group in self._ask("rules", {})["groups"] for rule in group["rules"]]

    def _ask(self, path: str, parameters: dict) -> dict | list:
        answer = httpx.get(f"{self.url}/api/v1/{path}", params=parameters).json()
        assert answer["status"] == "success", answer
        return answer["data"]


@contextmanager
def running_prometheus(
    folder: Path, address: str, metrics_url: str, rule_files: Sequence[Path] = ()
) -> Iterator[Prometheus]:
    """Serves on address (host:port), keeps its data in folder, ends with the context."""
    target = httpx.URL(metrics_url).netloc.decode()
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "scrape_configs": [{"job_name": JOB, "static_configs": [{"targets": [target]}]}],
        "rule_files": [str(file) for file in rule_files],
    }
    (folder / "prometheus.yml").write_text(json.dumps(config))
    command = [
        needed("prometheus"),
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}",
    ]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            wait_until(lambda: _answers(f"http://{address}/-/ready"))
            yield Prometheus(f"http://{address}")
        finally:
            process.terminate()
            process.wait(20)


def _answers(url: str) -> bool:
    try:
        return httpx.get(url).status_code == 200
    except httpx.TransportError:
        return False
