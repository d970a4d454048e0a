"""Every architecture of the installed transformers: what the engine makes of it.

python -m tests.nightly.architectures [--only MODEL_TYPE ...] [--write docs/models.md]
"""

import argparse
import multiprocessing as mp
import sys
from collections import Counter
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path

from tests.fakes.architecture_trial import Outcome, Verdict, architectures, run_trial
from tests.nightly.architecture_table import Row, with_table

TRIAL_TIMEOUT_S = 300.0
_PRELOADED = ["tests.fakes.architecture_trial", "workers.models.transformers_bridge"]


def _trial(connection: Connection, model_type: str, class_name: str) -> None:
    import torch
    from transformers.utils import logging

    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    connection.send(run_trial(model_type, class_name))


def try_one(model_type: str, class_name: str) -> Outcome:
    """In a process that cannot end this one, with everything imported already."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_trial, args=(there, model_type, class_name))
    process.start()
    there.close()
    try:
        if not here.poll(TRIAL_TIMEOUT_S):
            return Outcome(Verdict.CRASHED, f"no end within {TRIAL_TIMEOUT_S:g} s")
        outcome: Outcome = here.recv()
        return outcome
    except EOFError:
        process.join()
        return Outcome(Verdict.CRASHED, f"its process ended with {process.exitcode}")
    finally:
        here.close()
        process.kill()
        process.join()


def sweep(only: list[str] | None) -> list[Row]:
    """One trial after the other, told as they end."""
    rows = []
    for model_type, class_name in architectures():
        if only is None or model_type in only:
            outcome = try_one(model_type, class_name)
            rows.append(Row(model_type, class_name, outcome.verdict, outcome.reason))
            print(*rows[-1], sep="  ", flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", help="these alone; cannot be written")
    parser.add_argument("--write", type=Path, help="the document whose table is replaced")
    args = parser.parse_args()
    if args.only and args.write:
        parser.error("a table has all architectures: --only cannot be written")
    rows = sweep(args.only)
    counts = Counter(row.verdict for row in rows)
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.most_common()))
    if args.write:
        text = args.write.read_text(encoding="utf-8")
        today = datetime.now(UTC).date()
        args.write.write_text(with_table(text, rows, today), encoding="utf-8")
    return 1 if counts[Verdict.DIFFERENT] or counts[Verdict.CRASHED] else 0


if __name__ == "__main__":
    sys.exit(main())
