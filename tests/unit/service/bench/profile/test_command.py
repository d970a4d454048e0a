"""The command on a CPU with the built-in model: tables for every phase, or one readable line."""

import pytest
import typer
from typer.testing import CliRunner, Result

from service.bench.cli import bench

app = typer.Typer()
app.command("bench")(bench)

SMALL = (
    *("--profile", "--model", "builtin-draft", "--profile-streams", "1", "--profile-streams", "3"),
    *("--profile-context", "16", "--engine", "max_step_tokens=64", "--engine", "device=cpu"),
)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "120"})


def rows(output: str, first_cell: str) -> list[list[str]]:
    lines = [line for line in output.splitlines() if line.startswith(f"│ {first_cell}")]
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]


@pytest.fixture(scope="module")
def output() -> str:
    result = run(*SMALL, "--peak-bandwidth", "0.01", "--peak-flops", "0.1")
    assert result.exit_code == 0, result.output
    return result.stdout


def test_prefill_and_every_number_of_streams_is_profiled(output: str) -> None:
    titles = [line for line in output.splitlines() if "us a step" in line]
    expected_titles = "prefill, 4 x 16", "decode, 1 x", "decode, 3 x"
    for title, expected in zip(titles, expected_titles, strict=True):
        assert expected in title


def test_the_parts_add_up_to_the_step_and_each_is_more_than_nothing(output: str) -> None:
    parts = [
        [float(cells[1].replace(",", "")) for cells in rows(output, name)]
        for name in ("attention", "GEMM", "other kernels", "idle")
    ]
    whole = [float(cells[1].replace(",", "")) for cells in rows(output, "step, profiled")]
    assert [sum(phase) for phase in zip(*parts, strict=True)] == pytest.approx(whole, rel=1e-3)
    assert min(map(min, parts)) > 0.0


def test_attention_gemm_and_step_have_floors_when_rates_are_given(output: str) -> None:
    for name in ("attention", "GEMM", "step, profiled"):
        assert all(float(cells[3].replace(",", "")) > 0.0 for cells in rows(output, name))


def test_a_device_whose_rates_are_unknown_has_no_floor() -> None:
    result = run(*SMALL[:5], *SMALL[7:])
    assert result.exit_code == 0, result.output
    assert [cells[3] for cells in rows(result.stdout, "GEMM")] == ["", ""]


@pytest.mark.parametrize(
    "arguments",
    [
        ("--url", "http://127.0.0.1:1"),
        ("--chat",),
        ("--peak-flops", "1"),
        ("--engine", "no_such_key=1"),
    ],
)
def test_flags_that_make_no_sense_are_usage_errors(arguments: tuple[str, ...]) -> None:
    assert run("--profile", *arguments).exit_code == 2


def test_a_model_that_is_not_there_is_one_readable_line() -> None:
    result = run("--profile", "--model", "/no/such/folder")
    assert result.exit_code == 1
    assert "the engine cannot start" in result.stderr
    assert "Traceback" not in result.output
