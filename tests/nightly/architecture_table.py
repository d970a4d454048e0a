"""The table of architectures in a document: written by the sweep, read by its test."""

import re
from collections import Counter
from datetime import date
from typing import NamedTuple

import torch
import transformers

_BEGIN = "<!-- Written by python -m tests.nightly.architectures --write docs/models.md -->"
_END = "<!-- End of what is written. -->"
_MAX_REASON_LENGTH = 160
_ROW = re.compile(r"^\| `([^`]+)` \| `([^`]+)` \| ([a-z ]+) \| (.*) \|$", re.MULTILINE)


class Row(NamedTuple):
    """reason: a message, or, where it is served, how far log probabilities are apart."""

    model_type: str
    class_name: str
    verdict: str
    reason: str


def with_table(text: str, rows: list[Row], day: date) -> str:
    """The document with its table replaced. Raises ValueError where its marks are missing."""
    before, begin, rest = text.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not begin or not end:
        raise ValueError(f"the document has no {_BEGIN} ... {_END}")
    counts = Counter(row.verdict for row in rows)
    told = ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common())
    lines = [
        f"transformers {transformers.__version__}, torch {torch.__version__.partition('+')[0]}, "
        f"{day.isoformat()}: {len(rows)} architectures, {told}.",
        "",
        "| model_type | class | result | reason, or largest difference of a log probability |",
        "|---|---|---|---|",
        *(
            f"| `{r.model_type}` | `{r.class_name}` | {r.verdict} | {_cell(r.reason)} |"
            for r in rows
        ),
    ]
    return f"{before}{begin}\n" + "\n".join(lines) + f"\n{end}{after}"


def read_table(text: str) -> tuple[str, list[Row]]:
    """(version of transformers, rows) of a document with a table."""
    version = re.search(r"^transformers (\S+), torch", text, re.MULTILINE)
    if version is None:
        raise ValueError("the document does not say which transformers its table is of")
    return version[1], [Row(*match.groups()) for match in _ROW.finditer(text)]


def _cell(reason: str) -> str:
    short = reason.replace("|", "/").replace("<", "&lt;")
    return short if len(short) <= _MAX_REASON_LENGTH else short[: _MAX_REASON_LENGTH - 3] + "..."
