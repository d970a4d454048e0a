"""Requests by our own OpenAPI document, valid and not, from schemathesis's command.

Stateful testing stays off: no operation makes anything that another one could use.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.integration.fuzz.busy_machine import ANSWER as BUSY
from tests.integration.fuzz.tally import Tally

SOURCE = "http by schema"
OPERATIONS = "operations by schema"
CHECKS = (
    "no_fault_of_the_server",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
)
_ROOT = Path(__file__).parents[3]
# A body may break the schema and a ceiling at once; which of them is told is ours to choose.
_SETTINGS = """
[checks.negative_data_rejection]
expected-statuses = [400, 401, 403, 404, 405, 406, 413, 415, 422]
"""
_END_MARGIN_S = 120


def run(url: str, model: str, seconds: float, tally: Tally, folder: Path) -> None:
    """Runs for about `seconds`; folder: where the command may leave files."""
    counts_file = folder / "schemathesis-counts.json"
    (folder / "schemathesis.toml").write_text(_SETTINGS)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json"),
            *("--phases", "examples,coverage,fuzzing", "--max-time", str(max(1, round(seconds)))),
            *("--checks", ",".join(CHECKS), "--continue-on-failure", "--max-failures", "20"),
            *("--request-timeout", "60", "--generation-database", "none", "--warnings", "off"),
            *("--suppress-health-check", "all", "--no-color"),
        ],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": str(_ROOT),
            "SCHEMATHESIS_HOOKS": "tests.integration.fuzz.schemathesis_hooks",
            "FUZZ_MODEL": model,
            "FUZZ_COUNTS_FILE": str(counts_file),
        },
        capture_output=True,
        text=True,
        timeout=seconds + _END_MARGIN_S,
        check=False,
    )
    if done.returncode != 0:
        tally.fail(SOURCE, f"schemathesis ended with {done.returncode}\n{done.stdout}{done.stderr}")
    if not counts_file.exists():
        tally.fail(SOURCE, "schemathesis counted nothing")
        return
    counts = json.loads(counts_file.read_text())
    for operation, number in counts["operations"].items():
        tally.count(OPERATIONS, operation, number)
    for answer, number in counts["answers"].items():
        tally.count(SOURCE, answer, number)
        if answer.startswith("5") and answer != BUSY:
            tally.fail(SOURCE, f"{number} answers of status {answer}")
