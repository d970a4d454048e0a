"""`python tests/clients/guidellm_benchmark.py http://127.0.0.1:8000`: GuideLLM with its defaults.

Before it measures it asks for /health, which is its validation of a target.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

# Its processes of requests import all of it again; ten of them by default.
os.environ["GUIDELLM__MAX_WORKER_PROCESSES"] = "1"

from guidellm.__main__ import cli

from workers.builtin import builtin_model_path

NUM_REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS = 6, 24, 12


def benchmark(url, folder):
    """The report of one run of its command, in this process: its imports take most of the time."""
    arguments = [
        *("run", "--disable-console-interactive"),
        *("--backend", f"kind=openai_http,target={url}"),
        *("--profile", "kind=concurrent,streams=3"),
        *("--constraint", f"kind=max_requests,count={NUM_REQUESTS}"),
        *("--tokenizer", f"kind=huggingface_auto,model={builtin_model_path()}"),
        "--data",
        f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={OUTPUT_TOKENS}",
        *("--output", f"kind=json,path={folder}/report.json"),
    ]
    cli.main(arguments, prog_name="guidellm", standalone_mode=False)
    return json.loads((folder / "report.json").read_text())


def check(report):
    (run,) = report["benchmarks"]
    totals = run["metrics"]["request_totals"]
    # How many it counts as done is its own matter, an error is ours.
    assert totals["successful"] >= NUM_REQUESTS / 2, totals
    assert totals["errored"] == 0, totals
    tokens = run["metrics"]["output_token_count"]["successful"]
    assert tokens["mean"] == OUTPUT_TOKENS
    assert run["metrics"]["time_to_first_token_ms"]["successful"]["mean"] > 0
    assert run["metrics"]["inter_token_latency_ms"]["successful"]["mean"] > 0


def main(url):
    with tempfile.TemporaryDirectory() as folder:
        check(benchmark(url, Path(folder)))


if __name__ == "__main__":
    main(sys.argv[1])
