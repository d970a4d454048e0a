"""Hooks for the schemathesis command: valid names of the model, and counts of what was answered and
of what was called.

Loaded by SCHEMATHESIS_HOOKS; writes the counts as JSON to FUZZ_COUNTS_FILE when the process ends.
"""

import atexit
import json
import os
import zlib
from collections import Counter
from pathlib import Path

import schemathesis

from tests.integration.fuzz.busy_machine import ANSWER as BUSY
from tests.integration.fuzz.busy_machine import is_busy

_answers: Counter[str] = Counter()
_operations: Counter[str] = Counter()
_MODEL = os.environ["FUZZ_MODEL"]


def _is_chosen(text: str) -> bool:
    """For three of four texts, and for one text always alike, as drawing again needs it."""
    return zlib.crc32(text.encode("utf-8", "surrogatepass")) % 4 != 0


@schemathesis.hook
def map_body(context, body):
    """A name drawn at random reaches no engine; any other value of `model` stays what it is."""
    if isinstance(body, dict) and isinstance(body.get("model"), str) and _is_chosen(body["model"]):
        return {**body, "model": _MODEL}
    return body


@schemathesis.hook
def map_path_parameters(context, path_parameters):
    """None where a case leaves its path parameters out."""
    if not isinstance(path_parameters, dict):
        return path_parameters
    return {
        name: _MODEL if isinstance(value, str) and _is_chosen(value) else value
        for name, value in path_parameters.items()
    }


@schemathesis.hook
def after_call(context, case, response):
    _operations[case.operation.label] += 1
    _answers[_kind(response)] += 1


@schemathesis.check
def no_fault_of_the_server(context, response, case):
    """As schemathesis's own check of server errors, which knows no busy machine."""
    kind = _kind(response)
    assert not kind.startswith("5") or kind == BUSY, kind


def _kind(response):
    if response.status_code < 500:
        return str(response.status_code)
    error = (response.json() or {}).get("error", {})
    code, message = str(error.get("code")), str(error.get("message"))
    return BUSY if is_busy(code, message) else f"{response.status_code} {code}"


@atexit.register
def _write_counts():
    Path(os.environ["FUZZ_COUNTS_FILE"]).write_text(
        json.dumps({"answers": _answers, "operations": _operations})
    )
