"""The table of drafts beside peers, from logs of speculative.py and of its peers.

    python3 -m benchmarks.h200.drafts_table OUT/drafts_*.log

A row an engine, kind of drafts and acceptance, a column a number of streams: ms a token of a
stream, and what a step of a row brought. Below, for each number of streams and acceptance: our
fastest drafts as a multiple of our plain decoding's speed, and of each peer's fastest kind. Logs
may have other lines, which are passed over. Exit status 1 where they have no measurement.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

_OURS, _PLAIN = "tessera", "plain"
_BEGINNING = '{"engine": '


@dataclass(frozen=True, slots=True)
class Measured:
    """As drafted_decode.py prints it. acceptance: None of plain decoding."""

    engine: str
    drafts: str
    acceptance: float | None
    streams: int
    ms_a_token: float
    tokens_a_step: float | None

    @property
    def is_plain(self) -> bool:
        return self.drafts == _PLAIN


def measured_in(lines: Iterable[str]) -> Iterator[Measured]:
    """Of a log, in its order. What an engine writes to its standard error may stand beside a
    measurement in its line."""
    for line in lines:
        start = line.find(_BEGINNING)
        row = json.JSONDecoder().raw_decode(line[start:])[0] if start >= 0 else {}
        if "ms_a_token" in row:
            yield Measured(**{name: row[name] for name in Measured.__slots__})


def table(measured: list[Measured]) -> str:
    """In Markdown."""
    streams = sorted({one.streams for one in measured})
    cells: dict[tuple[str, str, float | None], dict[int, str]] = {}
    for one in measured:
        brought = "" if one.tokens_a_step is None else f" ({one.tokens_a_step:.2f})"
        row = cells.setdefault((one.engine, one.drafts, one.acceptance), {})
        row[one.streams] = f"{one.ms_a_token:.3f}{brought}"
    lines = [
        f"| engine | drafts | acceptance | {' | '.join(map(str, streams))} |",
        "|" + "---|" * (3 + len(streams)),
    ]
    for (engine, drafts, acceptance), own in cells.items():
        asked = "" if acceptance is None else f"{acceptance:g}"
        lines.append(
            f"| {engine} | {drafts} | {asked} | {' | '.join(own.get(n, '') for n in streams)} |"
        )
    return "\n".join(lines)


def leads(measured: list[Measured]) -> Iterator[str]:
    """A line for each number of streams and acceptance that we have drafts of. A peer may decode
    faster without drafts: its fastest kind counts."""
    ours = [one for one in measured if one.engine == _OURS and not one.is_plain]
    for streams, acceptance in sorted({(one.streams, one.acceptance or 0.0) for one in ours}):
        alike = [
            one
            for one in measured
            if one.streams == streams and (one.is_plain or one.acceptance == acceptance)
        ]
        best = _fastest(one for one in alike if one.engine == _OURS and not one.is_plain)
        parts = [f"{streams} streams at {acceptance:g}: {best.drafts} {best.ms_a_token:.3f} ms"]
        others = [("our plain decoding", [one for one in alike if _is_our_plain(one)])]
        for engine in sorted({one.engine for one in alike} - {_OURS}):
            others.append((engine, [one for one in alike if one.engine == engine]))
        for name, them in others:
            if them:
                other = _fastest(them)
                ratio = other.ms_a_token / best.ms_a_token
                parts.append(f"{ratio:.2f} of {name}'s speed ({other.drafts})")
        yield ", ".join(parts)


def _is_our_plain(one: Measured) -> bool:
    return one.engine == _OURS and one.is_plain


def _fastest(some: Iterable[Measured]) -> Measured:
    return min(some, key=lambda one: one.ms_a_token)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("logs", type=Path, nargs="+")
    measured = [
        one
        for log in parser.parse_args(argv).logs
        for one in measured_in(log.read_text(encoding="utf-8", errors="replace").splitlines())
    ]
    if not measured:
        print("no measurement in these logs", file=sys.stderr)
        return 1
    print(table(measured))
    print()
    for line in leads(measured):
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
