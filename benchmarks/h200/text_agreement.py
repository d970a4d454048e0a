"""Greedy text of the built-in model beside Transformers' on the same device and in the same dtype.

    python3 -m benchmarks.h200.text_agreement --backend fa3 fa3_triton

200 prompts of 24 to 512 tokens, 128 tokens each, all prompts in one batch of ours, with CUDA graphs
where there are any, once for each backend. Prompts are pieces of the standard library files that
the model was not trained on. Two sets of them:
- "held-out": the first 200 pieces. The model wavers on many: Transformers does not repeat its own
  text when it computes attention another way (eager against PyTorch's
  scaled_dot_product_attention).
- "decided": the first 200 pieces on whose text Transformers' float32 logits leave no doubt: at
  every token the second likeliest lies further back than bf16 can shift it. Chosen by Transformers
  alone, among --candidates pieces; about one in twenty is.

The bound: twice the 99.9th percentile of the error of the two likeliest tokens' bf16 logits. Every
first difference of two texts is judged by Transformers' float32 logits after the common prefix: a
near-tie is one where neither token lies further than the bound below the best.
Exit status 1 if a difference is no near-tie, if fewer than --min-equal of the decided texts are
equal, or fewer of the held-out ones than of Transformers' own two, less one in twenty.
"""

import argparse
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.h200.text_comparison import (
    FirstDifference,
    Verdict,
    cut_prompts,
    first_differences,
    share_equal,
)
from workers.builtin import builtin_model_path
from workers.builtin.corpus import collect_corpus, is_held_out
from workers.config import EngineConfig
from workers.engine.engine import Engine
from workers.sampling.params import SamplingParams

LENGTHS = (24, 48, 96, 128, 192, 256, 384, 512)
MAX_BATCH = 768
MAX_SHOWN = 12
"""Differences printed for each set: those that are no near-tie, then those with the widest gaps."""

Texts = list[list[int]]


class Stopwatch:
    """Says on standard error how long each part took."""

    def __init__(self) -> None:
        self._last_s = time.perf_counter()

    def lap(self, what: str) -> None:
        now_s = time.perf_counter()
        print(f"{what}: {now_s - self._last_s:.1f} s", file=sys.stderr, flush=True)
        self._last_s = now_s


@dataclass(frozen=True, slots=True)
class References:
    """Transformers' models of one checkpoint: in the dtype under test, and in float32."""

    eager: Any
    sdpa: Any
    exact: Any

    @classmethod
    def load(cls, folder: Path, dtype: torch.dtype, device: torch.device) -> "References":
        def model(attention: str, of_dtype: torch.dtype) -> Any:
            loaded = AutoModelForCausalLM.from_pretrained(
                folder, dtype=of_dtype, attn_implementation=attention
            )
            # Texts go on behind an end of sequence, as ours do.
            loaded.generation_config.eos_token_id = None
            return loaded.eval().to(device)  # type: ignore[no-untyped-call]

        return cls(model("eager", dtype), model("sdpa", dtype), model("eager", torch.float32))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument(
        "--backend", nargs="+", default=[None], help="attention backends, default the automatic one"
    )
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--candidates", type=int, default=6000)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--min-equal", type=float, default=0.95)
    return parser.parse_args()


def held_out_documents(folder: Path) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(folder, model_max_length=sys.maxsize)
    corpus = collect_corpus(Path(sysconfig.get_path("stdlib")))
    return [
        tokenizer(document.text)["input_ids"] for document in corpus if is_held_out(document.group)
    ]


def our_texts(arguments: argparse.Namespace, backend: str | None, prompts: Texts) -> Texts:
    engine = Engine.from_config(
        EngineConfig(
            model="builtin",
            device=arguments.device,
            dtype=arguments.dtype,
            attention_backend=backend,
            gpu_memory_fraction=0.5,
            enable_prefix_cache=False,
            enable_cuda_graphs=not arguments.eager,
        )
    )
    print(f"ours: {engine.info.attention_backend}, page size {engine.info.page_size}")
    params = SamplingParams(temperature=0.0, max_tokens=arguments.tokens, ignore_eos=True)
    texts = [result.token_ids for result in engine.generate(prompts, params)]
    engine.close()
    return texts


def equal_lengths(prompts: Texts) -> Iterator[list[int]]:
    """Indices of prompts of one length, MAX_BATCH at most: batches that need no padding."""
    for length in dict.fromkeys(map(len, prompts)):
        indices = [index for index, prompt in enumerate(prompts) if len(prompt) == length]
        for start in range(0, len(indices), MAX_BATCH):
            yield indices[start : start + MAX_BATCH]


@torch.inference_mode()
def their_texts(model: Any, prompts: Texts, num_tokens: int) -> Texts:
    """Transformers' generate over prompts, a batch for each length."""
    texts: Texts = [[] for _ in prompts]
    for indices in equal_lengths(prompts):
        ids = torch.tensor([prompts[index] for index in indices], device=model.device)
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        for index, row in zip(indices, out[:, ids.shape[1] :].tolist(), strict=True):
            texts[index] = row
    return texts


@dataclass(frozen=True, slots=True)
class Certainty:
    """How sure Transformers is of its own texts.

    errors: |rounded - float32| of the two likeliest tokens' logits at every position of all texts,
    ascending. margins: for each text the least lead of its token over any other in float32,
    negative where another one leads.
    """

    errors: torch.Tensor
    margins: list[float]

    @property
    def bound(self) -> float:
        return 2.0 * float(self.errors[int(0.999 * (len(self.errors) - 1))])


@torch.inference_mode()
def certainty(references: References, prompts: Texts, texts: Texts) -> Certainty:
    errors = []
    margins = [0.0] * len(texts)
    for indices in equal_lengths(prompts):
        rows = [prompts[index] + texts[index] for index in indices]
        ids = torch.tensor(rows, device=references.exact.device)
        num_kept = len(texts[0]) + 1
        exact = references.exact(ids, logits_to_keep=num_kept).logits[:, :-1]
        rounded = references.sdpa(ids, logits_to_keep=num_kept).logits[:, :-1].float()
        top = exact.topk(2, dim=-1)
        errors.append((rounded.gather(-1, top.indices) - top.values).abs().flatten().cpu())
        said = ids[:, -num_kept + 1 :]
        lead = exact.gather(-1, said[..., None])[..., 0] - torch.where(
            top.indices[..., 0] == said, top.values[..., 1], top.values[..., 0]
        )
        for index, margin in zip(indices, lead.amin(dim=-1).tolist(), strict=True):
            margins[index] = margin
    return Certainty(torch.cat(errors).sort().values, margins)


@torch.inference_mode()
def judge(
    references: References,
    prompts: Texts,
    texts: Texts,
    differences: Sequence[FirstDifference],
    bound: float,
) -> list[Verdict]:
    """Each difference by the float32 logits that follow its prompt and the common text."""
    verdicts = []
    for difference in differences:
        index = difference.prompt_index
        prefix = prompts[index] + texts[index][: difference.position]
        ids = torch.tensor([prefix], device=references.exact.device)
        logits = references.exact(ids, logits_to_keep=1).logits[0, -1]
        ours, theirs = logits[difference.our_token], logits[difference.their_token]
        verdicts.append(Verdict(difference, float(ours), float(theirs), float(logits.max()), bound))
    return verdicts


def report(verdicts: list[Verdict]) -> None:
    ordered = sorted(verdicts, key=lambda verdict: (verdict.is_near_tie, -verdict.gap))
    for verdict in ordered[:MAX_SHOWN]:
        difference = verdict.difference
        print(
            f"  prompt {difference.prompt_index:3} token {difference.position:3}: ours"
            f" {difference.our_token:4} ({verdict.our_logit:.4f}), theirs"
            f" {difference.their_token:4} ({verdict.their_logit:.4f}), gap {verdict.gap:.4f},"
            f" best {verdict.best_logit:.4f}: {'near-tie' if verdict.is_near_tie else 'NO TIE'}"
        )
    if len(ordered) > MAX_SHOWN:
        print(f"  ... and {len(ordered) - MAX_SHOWN} near-ties with narrower gaps")


def compare_texts(
    name: str, references: References, prompts: Texts, pairs: tuple[Texts, Texts], bound: float
) -> tuple[float, bool]:
    """Print how ours and theirs agree. Returns the share of equal texts, and whether all
    differences are near-ties."""
    ours, theirs = pairs
    verdicts = judge(references, prompts, theirs, first_differences(ours, theirs), bound)
    num_ties = sum(verdict.is_near_tie for verdict in verdicts)
    equal = share_equal(ours, theirs)
    print(
        f"{name}: {equal:.1%} of {len(prompts)} texts equal Transformers' with sdpa; {num_ties} of "
        f"{len(verdicts)} first differences are near-ties"
    )
    report(verdicts)
    return equal, num_ties == len(verdicts)


@dataclass(frozen=True, slots=True)
class Expected:
    """What our texts are held against. prompts: the held-out ones, then the decided ones; theirs:
    Transformers' texts of them; eager: of the held-out ones, attention computed its other way."""

    prompts: Texts
    theirs: Texts
    eager: Texts
    bound: float


def expect(arguments: argparse.Namespace, references: References, folder: Path) -> Expected:
    """Transformers' texts, and what they say of themselves."""
    number = arguments.prompts
    prompts = cut_prompts(held_out_documents(folder), LENGTHS, max(number, arguments.candidates))
    clock = Stopwatch()
    theirs = their_texts(references.sdpa, prompts, arguments.tokens)
    clock.lap("Transformers' texts")
    sure = certainty(references, prompts, theirs)
    eager = their_texts(references.eager, prompts[:number], arguments.tokens)
    clock.lap("their certainty")
    bound = sure.bound
    decided = [index for index, margin in enumerate(sure.margins) if margin > bound]
    print(
        f"error of {arguments.dtype} logits: median {sure.errors.median():.4f}, 99.9th percentile "
        f"{bound / 2:.4f}, most {sure.errors[-1]:.4f}; bound {bound:.4f}; "
        f"{len(decided)} of {len(prompts)} texts decided\n"
        f"Transformers' own, eager against sdpa: {share_equal(eager, theirs[:number]):.1%} of "
        f"{number} held-out texts equal"
    )
    kept = [*range(number), *decided[:number]]
    return Expected([prompts[i] for i in kept], [theirs[i] for i in kept], eager, bound)


def compare_backend(
    arguments: argparse.Namespace, backend: str | None, references: References, expected: Expected
) -> bool:
    """Print how one backend's texts agree. Returns whether they do as the module demands."""
    clock = Stopwatch()
    number = len(expected.eager)
    ours = our_texts(arguments, backend, expected.prompts)
    clock.lap("our texts")
    own = share_equal(expected.eager, expected.theirs[:number])
    print(f"ours against its eager ones: {share_equal(ours[:number], expected.eager):.1%}")
    demands = {
        "held-out": (slice(number), min(arguments.min_equal, own - 0.05)),
        "decided": (slice(number, None), arguments.min_equal),
    }
    are_met = []
    for name, (part, min_equal) in demands.items():
        pairs = ours[part], expected.theirs[part]
        equal, are_ties = compare_texts(
            name, references, expected.prompts[part], pairs, expected.bound
        )
        are_met.append(equal >= min_equal and are_ties)
    return all(are_met)


def main() -> int:
    arguments = parse_arguments()
    folder = builtin_model_path()
    device = torch.device(arguments.device)
    references = References.load(folder, getattr(torch, arguments.dtype), device)
    expected = expect(arguments, references, folder)
    torch.cuda.empty_cache()
    agree = [
        compare_backend(arguments, backend, references, expected) for backend in arguments.backend
    ]
    return 0 if all(agree) else 1


if __name__ == "__main__":
    sys.exit(main())
