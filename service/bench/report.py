"""How a result looks: a table for people, JSON for programs. Knows no load and no transport."""

from dataclasses import dataclass

import msgspec
from rich.console import Console
from rich.table import Table

from service.bench.statistics import MAX_CREDIBLE_LAG_S, BenchResult, Distribution

_LATENCIES = (
    ("TTFT", "ttft_s"),
    ("Inter-token", "inter_token_s"),
    ("Per output token", "time_per_output_token_s"),
    ("End to end", "end_to_end_s"),
    ("Client lag", "client_lag_s"),
    ("Event-loop lag", "event_loop_lag_s"),
)
_PERCENTILES = ("mean", "p50", "p90", "p95", "p99", "max")


@dataclass(frozen=True, slots=True)
class BenchReport:
    """A result and what it is a result of. load and workload are as the flags said."""

    target: str
    model: str
    load: str
    workload: dict[str, str | int | float | bool]
    result: BenchResult

    def to_json(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=2)


def print_report(report: BenchReport, console: Console) -> None:
    """Print the table."""
    result = report.result
    console.print(f"[bold]{report.model}[/bold] over {report.target}, {report.load}")
    console.print(_latency_table(result))
    console.print(_throughput_table(result))
    for code, count in result.errors.items():
        console.print(f"[red]{count} requests ended with {code}[/red]")
    if result.example_error:
        console.print(f"[red]the first of them: {result.example_error}[/red]", highlight=False)
    if result.is_client_late:
        console.print(
            f"[yellow]The client was late (a lag above {MAX_CREDIBLE_LAG_S * 1e3:g} ms at p99): it "
            "was short of CPU, and latencies are too high and the load too low by that.[/yellow]"
        )


def _latency_table(result: BenchResult) -> Table:
    table = Table("ms", *_PERCENTILES)
    for column in table.columns:
        column.no_wrap = True
    for column in table.columns[1:]:
        column.justify = "right"
    for title, name in _LATENCIES:
        values: Distribution | None = getattr(result, name)
        if values is not None:
            table.add_row(title, *(_ms(getattr(values, column)) for column in _PERCENTILES))
    return table


def _ms(seconds: float) -> str:
    milliseconds = seconds * 1e3
    return f"{milliseconds:,.2f}" if milliseconds < 1000 else f"{milliseconds:,.0f}"


def _throughput_table(result: BenchResult) -> Table:
    table = Table(show_header=False)
    table.add_column()
    table.add_column(justify="right")
    rows = (
        ("Requests", f"{result.num_ok:,} of {result.num_requests:,} in {result.elapsed_s:,.2f} s"),
        ("Requests/s", f"{result.requests_per_s:,.2f}"),
        ("Input tokens", f"{result.num_input_tokens:,} ({result.num_cached_tokens:,} cached)"),
        ("Input tokens/s", f"{result.input_tokens_per_s:,.1f}"),
        ("Output tokens", f"{result.num_output_tokens:,}"),
        ("Output tokens/s", f"{result.output_tokens_per_s:,.1f}"),
    )
    for row in rows:
        table.add_row(*row)
    if result.tokens_per_delivery is not None:
        table.add_row("Tokens per delivery", f"{result.tokens_per_delivery:.2f}")
    return table
