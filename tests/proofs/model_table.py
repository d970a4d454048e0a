"""The table of models in docs/models.md: what each declares and what tests proved of it.

`python -m tests.proofs.model_table docs/models.md` writes it, without FILE it is printed. The same
on every machine: what is declared (workers/models/features.py) and committed results of runs on
GPUs are all that it reads.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tests.proofs.cells import Cell
from tests.proofs.choice import row
from tests.proofs.plugin import COMMITTED
from tests.proofs.results import GpuResults, read_results
from workers.models.features import ModelCapability, ModelFeature, all_capabilities

_BEGIN = "<!-- Written by python -m tests.proofs.model_table docs/models.md -->"
_END = "<!-- End of the table of models. -->"
_LABELS = {
    ModelFeature.CPU: "CPU",
    ModelFeature.QUANTISED: "Formats",
    ModelFeature.TENSOR_PARALLEL: "TP",
    ModelFeature.EXPERT_PARALLEL: "EP",
    ModelFeature.SPECULATION: "Drafts",
    ModelFeature.LORA: "LoRA",
    ModelFeature.GPU: "GPU",
    ModelFeature.GRAPHS: "Graphs",
    ModelFeature.TENSOR_PARALLEL_GPU: "TP on GPUs",
    ModelFeature.EXPERT_PARALLEL_GPU: "EP on GPUs",
}


def unserved(
    models: Iterable[ModelCapability], collected: Mapping[str, Iterable[Sequence[str]]]
) -> list[Cell]:
    """Of what models declare, what no test is there for. collected: cells by node id."""
    proved: dict[bool, set[Cell]] = {True: set(), False: set()}
    for node, cells in collected.items():
        proved[node.startswith("tests/gpu/")].update(Cell(*cell) for cell in cells)
    return sorted(
        cell
        for model in models
        for feature in model.features
        if (cell := Cell(model.subject, feature.value)) not in proved[feature.is_proved_on_gpu]
    )


def failed_models(results: Iterable[GpuResults]) -> list[str]:
    """What a test on a GPU showed to be wrong, as "H200: LlamaForCausalLM: decode graphs"."""
    return [
        f"{of_gpu.gpu}: {name}: {what}"
        for of_gpu in results
        for of_models in (of_gpu.models, of_gpu.ranked_models)
        for name, of_model in of_models.items()
        for what in of_model.failed
    ]


def render_models(models: Iterable[ModelCapability], results: Sequence[GpuResults]) -> str:
    """The table and its reasons as Markdown."""
    notes: list[str] = []
    lines = [row(["Model", "Code", *_LABELS.values()]), row(["---"] * (2 + len(_LABELS)))]
    for model in models:
        cells = [_cell(model, feature, results, notes) for feature in _LABELS]
        lines.append(row([_named(model.subject), model.code, *cells]))
    lines += ["", *(f"{number}. {note}" for number, note in enumerate(notes, start=1))]
    return "\n".join(lines) + "\n"


def with_models(text: str, table: str) -> str:
    """The document with its table replaced. Raises ValueError where its marks are missing."""
    before, begin, rest = text.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not begin or not end:
        raise ValueError(f"the document has no {_BEGIN} ... {_END}")
    return f"{before}{begin}\n{table}{end}{after}"


def _named(subject: str) -> str:
    return subject if " " in subject or subject.islower() else f"`{subject}`"


def _cell(
    model: ModelCapability,
    feature: ModelFeature,
    results: Sequence[GpuResults],
    notes: list[str],
) -> str:
    if feature in model.why_not:
        note = model.why_not[feature]
        if note not in notes:
            notes.append(note)
        return f"no ({notes.index(note) + 1})"
    if not feature.is_proved_on_gpu:
        return "yes"
    runs = [
        (of_gpu.gpu, of_models[model.subject])
        for of_gpu in results
        for of_models in (of_gpu.models, of_gpu.ranked_models)
        if model.subject in of_models
    ]
    broken = [gpu for gpu, run in runs if feature.value in run.failed]
    if broken:
        return f"fails on {', '.join(broken)}"
    return "yes" if any(feature.value in run.passed for _, run in runs) else "not run"


def main(arguments: Sequence[str]) -> None:
    table = render_models(all_capabilities(), read_results(COMMITTED))
    if not arguments:
        sys.stdout.write(table)
        return
    document = Path(arguments[0])
    text = document.read_text(encoding="utf-8")
    document.write_text(with_models(text, table), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
