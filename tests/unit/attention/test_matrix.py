"""The generated documentation is what the code says."""

from dataclasses import replace
from pathlib import Path

from attention.backends.torch_native import TorchNativeBackend
from attention.matrix import main, render_matrix
from attention.registry import registered_backends

COMMITTED = Path(__file__).parents[3] / "docs" / "attention-backends.md"


def test_committed_matrix_is_current():
    assert COMMITTED.read_text(encoding="utf-8") == render_matrix(registered_backends()), (
        "run: python -m attention.matrix docs/attention-backends.md"
    )


def test_every_backend_has_a_column_with_what_it_declares():
    special = replace(
        TorchNativeBackend.capability,
        name="special",
        min_compute_capability=(9, 0),
        max_compute_capability=(9, 0),
        page_sizes=(64, 128),
        default_page_size=128,
        has_sinks=False,
    )
    newer = replace(special, name="newer", min_compute_capability=(10, 0))
    others = [
        type("Backend", (TorchNativeBackend,), {"capability": declared})
        for declared in (special, newer)
    ]
    text = render_matrix([TorchNativeBackend, *others])
    rows = {line.split(" | ")[0].strip("| "): line for line in text.splitlines() if "|" in line}
    assert rows["Page sizes"] == "| Page sizes | 1 to 256 | 64, 128 | 64, 128 |"
    assert rows["Default page size"] == "| Default page size | 16 | 128 | 128 |"
    assert rows["GPU generations"].startswith("| GPU generations | any | sm90 | ")
    assert rows["Attention sinks"] == "| Attention sinks | yes | no | no |"


def test_command_writes_the_file_or_prints_it(tmp_path, capsys):
    target = tmp_path / "matrix.md"
    main([str(target)])
    main([])
    assert target.read_text(encoding="utf-8") == capsys.readouterr().out
