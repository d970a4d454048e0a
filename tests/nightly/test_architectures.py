"""The table of architectures in docs/models.md, and that its sweep tells what it should."""

import os
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.fakes.architecture_trial import Outcome, Verdict, architectures
from tests.nightly.architecture_table import Row, read_table, with_table
from tests.nightly.architectures import try_one

DOCUMENT = Path(__file__).parents[2] / "docs" / "models.md"


@pytest.mark.parametrize(
    ("model_type", "class_name", "verdict"),
    [
        ("mistral3", "Mistral3ForConditionalGeneration", Verdict.SERVED),
        ("kimi_k25", "Kimi_K25ForConditionalGeneration", Verdict.SERVED),
        ("iquestcoder", "LlamaForCausalLM", Verdict.SERVED),
        ("olmoe", "OlmoeForCausalLM", Verdict.SERVED),
        ("camembert", "CamembertForCausalLM", Verdict.REFUSED),
        ("jamba", "JambaForCausalLM", Verdict.SERVED),
        ("mllama", "MllamaForConditionalGeneration", Verdict.SERVED),
        ("deepseek_v32", "DeepseekV32ForCausalLM", Verdict.SERVED),
        ("moshi", "MoshiForCausalLM", Verdict.REFUSED),
    ],
)
def test_architectures_come_out_as_they_should(
    model_type: str, class_name: str, verdict: Verdict
) -> None:
    outcome = try_one(model_type, class_name)
    assert outcome.verdict == verdict, outcome.reason


class _EndsItsProcess(str):
    """Whatever process is told of it."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return os._exit, (7,)


def test_a_process_that_dies_is_a_verdict() -> None:
    outcome = try_one("llama", _EndsItsProcess("LlamaForCausalLM"))
    assert outcome == Outcome(Verdict.CRASHED, "its process ended with 7")


def test_the_table_names_none_that_is_served_wrongly_or_crashes() -> None:
    _, rows = read_table(DOCUMENT.read_text(encoding="utf-8"))
    assert {row.verdict for row in rows} <= {Verdict.SERVED, Verdict.REFUSED}
    assert sum(row.verdict == Verdict.SERVED for row in rows) >= 227


def test_the_table_has_every_architecture_of_its_version() -> None:
    version, rows = read_table(DOCUMENT.read_text(encoding="utf-8"))
    if version != transformers.__version__:
        pytest.skip(f"the table is of transformers {version}, not {transformers.__version__}")
    assert [(row.model_type, row.class_name) for row in rows] == architectures()


def test_what_is_written_is_read_back() -> None:
    rows = [
        Row("llama", "LlamaForCausalLM", "served", "3e-06"),
        Row("odd", "OddForCausalLM", "refused", "a <b> | c"),
    ]
    marks = DOCUMENT.read_text(encoding="utf-8")
    text = with_table(marks, rows, date(2026, 11, 22))
    assert "2026-11-22: 2 architectures, 1 served, 1 refused." in text
    assert read_table(text) == (
        transformers.__version__,
        [rows[0], Row("odd", "OddForCausalLM", "refused", "a &lt;b> / c")],
    )
    with pytest.raises(ValueError, match="the document has no"):
        with_table("# Models", rows, date(2026, 11, 22))
