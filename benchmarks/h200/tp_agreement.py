"""Whether an engine over several GPUs says what the same engine says on one.

    python3 -m benchmarks.h200.tp_texts one.json
    python3 -m benchmarks.h200.tp_texts two.json --tp 2
    python3 -m benchmarks.h200.tp_agreement one.json two.json

Texts in float32 have to be equal. Ranks add partial sums up in another order than one GPU does, so
bf16 texts part at near-ties: every first difference is judged as text_agreement.py does it, by
Transformers' float32 logits, with the bound that its bf16 logits give.
Exit status 1 if a difference is no near-tie or fewer than --min-equal of the texts are equal.
"""

import argparse
import sys
from pathlib import Path

import torch

from benchmarks.h200.text_agreement import References, certainty, judge, report
from benchmarks.h200.text_comparison import Verdict, first_differences, share_equal
from benchmarks.h200.tp_texts import EngineTexts


def check_same_task(alone: EngineTexts, together: EngineTexts) -> None:
    """Raises ValueError where two engines were not asked the same, or not in the same dtype."""
    if (alone.model, alone.dtype) != (together.model, together.dtype):
        raise ValueError(f"{alone.name} and {together.name} differ in more than their ranks")
    if alone.prompts != together.prompts:
        raise ValueError(f"{alone.name} and {together.name} had other prompts")


def agrees(equal: float, verdicts: list[Verdict], dtype: str, min_equal: float) -> bool:
    """equal: the share of equal texts; verdicts: of all first differences; none in float32."""
    if dtype == "float32":
        return equal == 1.0
    return equal >= min_equal and all(verdict.is_near_tie for verdict in verdicts)


class Judge:
    """Transformers' opinion of the texts of one engine on one GPU."""

    def __init__(self, alone: EngineTexts, device: torch.device) -> None:
        self._alone = alone
        self._references = References.load(Path(alone.model), getattr(torch, alone.dtype), device)
        self.bound = certainty(self._references, alone.prompts, alone.texts).bound

    def verdicts(self, together: EngineTexts) -> list[Verdict]:
        differences = first_differences(together.texts, self._alone.texts)
        prompts, texts = self._alone.prompts, self._alone.texts
        return judge(self._references, prompts, texts, differences, self.bound)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("alone", type=Path, help="texts of one GPU")
    parser.add_argument("together", type=Path, nargs="+", help="texts of several")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--min-equal", type=float, default=0.6, help="of bf16 texts")
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    alone = EngineTexts.read(arguments.alone)
    judge_of_alone: Judge | None = None
    are_met = []
    for path in arguments.together:
        together = EngineTexts.read(path)
        check_same_task(alone, together)
        equal, verdicts = share_equal(together.texts, alone.texts), list[Verdict]()
        if equal < 1.0 and alone.dtype != "float32":
            judge_of_alone = judge_of_alone or Judge(alone, torch.device(arguments.device))
            verdicts = judge_of_alone.verdicts(together)
        is_met = agrees(equal, verdicts, alone.dtype, arguments.min_equal)
        num_ties = sum(verdict.is_near_tie for verdict in verdicts)
        print(
            f"{together.name}: {equal:.1%} of {len(alone.texts)} texts equal those of one GPU; "
            f"{num_ties} of {len(verdicts)} first differences are near-ties: "
            f"{'agrees' if is_met else 'DOES NOT AGREE'}"
        )
        report([verdict for verdict in verdicts if not verdict.is_near_tie])
        are_met.append(is_met)
    return 0 if all(are_met) else 1


if __name__ == "__main__":
    sys.exit(main())
