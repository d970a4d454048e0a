"""Trains the model that ships with Tessera, and its draft, from the Python standard library.

    CUBLAS_WORKSPACE_CONFIG=:4096:8 python -m workers.builtin.train --out DIR

One command: corpus, tokenizer, target, draft (distilled from the target), held-out losses, and two
Hugging Face folders beside `training_report.json`. Seeded; the corpus digest in the report says
whether two runs read the same text. Knows nothing of the engine that will serve the result.
"""

import argparse
import json
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from workers.builtin import builtin_model_path, fit, report
from workers.builtin.call_scores import score
from workers.builtin.corpus import collect_corpus
from workers.builtin.data import Tokens, collect_texts, new_tokenizer, tokenize
from workers.builtin.tokenizer import (
    END_OF_TEXT_ID,
    MESSAGE_END_ID,
    PAD_ID,
    save_tokenizer,
)

TARGET_SHAPE = fit.ModelShape(
    hidden_size=256,
    intermediate_size=640,
    num_layers=7,
    num_q_heads=8,
    num_kv_heads=4,
    head_dim=64,
)
DRAFT_SHAPE = fit.ModelShape(
    hidden_size=128,
    intermediate_size=320,
    num_layers=2,
    num_q_heads=4,
    num_kv_heads=4,
    head_dim=64,
)
LEARNING_RATE = 3e-3
WEIGHT_DECAY = 0.2
TARGET_DROPOUT = 0.2  # 3 M tokens of text are few for 7 M parameters, and many for 1 M
DRAFT_DROPOUT = 0.0
DRAFT_HARD_SHARE = 0.25
TARGET_SHARE_OF_TIME = 0.65  # of what is left of the limit when its fit begins
DRAFT_SHARE_OF_TIME = 0.9
NUM_EVALUATIONS = 25
MADE_CONVERSATIONS = 20_000  # with functions, and as many with JSON
HELD_OUT_EXAMPLES = 100  # of each kind
SMOKE_CONVERSATIONS = 200
SMOKE_EXAMPLES = 2
NUM_SHOWN = 4  # held-out examples of each kind in the log


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the whole recipe; see the module docstring."""
    options = _options(arguments)
    started = time.monotonic()
    device = torch.device(options.device)

    documents = collect_corpus(options.stdlib)
    is_smoke = device.type == "cpu"
    texts = collect_texts(
        documents,
        options.seed,
        SMOKE_CONVERSATIONS if is_smoke else MADE_CONVERSATIONS,
        SMOKE_EXAMPLES if is_smoke else HELD_OUT_EXAMPLES,
    )
    tokenizer = new_tokenizer(texts) if options.new_tokenizer else _shipped_tokenizer()
    tokens = tokenize(tokenizer, texts)
    _say(started, f"{len(documents)} documents, unigram {tokens.unigram_loss:.3f} nats/token")

    held_out = report.windows(tokens.held_out_text, device)
    trainer = _Trainer(options, tokens, held_out, device, started)
    target, target_fit = trainer.target()
    draft, draft_fit = trainer.draft(target)

    facts: dict[str, Any] = {
        "command": f"python -m workers.builtin.train --steps {options.steps}"
        f" --draft-steps {options.draft_steps} --device {options.device} --seed {options.seed}"
        f" --time-limit-s {options.time_limit_s:g}",
        "environment": report.environment(device) | {"is_repeatable": options.repeatable},
        "corpus": report.corpus_facts(documents, texts, tokens),
        "recipe": trainer.settings(),
    }
    for name, model, fitted in (("target", target, target_fit), ("draft", draft, draft_fit)):
        folder = options.out / name
        shipped = _save_model(model, tokenizer, folder).to(device)
        facts[name] = report.model_facts(shipped, folder, fitted, tokens, held_out)
        complete = report.greedy(shipped, tokenizer, device)
        facts[name]["samples"] = report.samples(complete)
        said = complete([example.prompt for example in texts.examples])
        facts[name]["calls_and_json"] = score(texts.examples, said)
        print(report.transcript(texts.examples, said, NUM_SHOWN), flush=True)
        for part in ("held_out", "samples", "calls_and_json"):
            _say(started, f"{name}: {json.dumps(facts[name][part], indent=1)}")
    facts["draft"]["agreement_with_target"] = asdict(fit.agreement(target, draft, held_out))
    facts["wall_s"] = round(time.monotonic() - started, 1)
    report.write(facts, options.out / "training_report.json")
    _say(started, f"wrote {options.out}")


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m workers.builtin.train",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the two models")
    parser.add_argument("--steps", type=int, default=7000, help="updates of the target")
    parser.add_argument("--draft-steps", type=int, default=5000, help="updates of the draft")
    parser.add_argument("--device", default="cuda", help="cuda or cpu (cpu: for a smoke run)")
    parser.add_argument("--seed", type=int, default=0, help="of initial weights, data and dropout")
    parser.add_argument(
        "--time-limit-s", type=float, default=540.0, help="anneal and stop early beyond this"
    )
    parser.add_argument(
        "--repeatable",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="PyTorch's deterministic algorithms; CUDA wants CUBLAS_WORKSPACE_CONFIG=:4096:8",
    )
    parser.add_argument(
        "--new-tokenizer", action="store_true", help="train one too; else the one that ships"
    )
    parser.add_argument(
        "--stdlib",
        type=Path,
        default=Path(sysconfig.get_paths()["stdlib"]),
        help="Lib folder with the sources and topics; of the running Python's minor version",
    )
    return parser.parse_args(arguments)


class _Trainer:
    """Fits the two models on one corpus, inside one time limit."""

    def __init__(
        self,
        options: argparse.Namespace,
        tokens: Tokens,
        held_out: Tensor,
        device: torch.device,
        started: float,
    ) -> None:
        self._options = options
        self._tokens = tokens
        self._device = device
        self._started = started
        self._held_out = held_out
        self._batch_tokens = 32768 if device.type == "cuda" else 2048

    def target(self) -> tuple[LlamaForCausalLM, fit.FitResult]:
        """The target, from scratch, in TARGET_SHARE_OF_TIME of what the limit leaves."""
        recipe = self._recipe(self._options.steps, TARGET_DROPOUT, TARGET_SHARE_OF_TIME)
        return self._fit("target", TARGET_SHAPE, recipe, fit.next_token_loss)

    def draft(self, target: LlamaForCausalLM) -> tuple[LlamaForCausalLM, fit.FitResult]:
        """The draft, distilled from the target, in most of the time that is left."""
        recipe = self._recipe(self._options.draft_steps, DRAFT_DROPOUT, DRAFT_SHARE_OF_TIME)
        loss = fit.distillation_loss(target, DRAFT_HARD_SHARE)
        return self._fit("draft", DRAFT_SHAPE, recipe, loss)

    def settings(self) -> dict[str, float]:
        """What both fits share or differ in, for the report."""
        return {
            "batch_tokens": self._batch_tokens,
            "learning_rate": LEARNING_RATE,
            "weight_decay": WEIGHT_DECAY,
            "target_dropout": TARGET_DROPOUT,
            "draft_dropout": DRAFT_DROPOUT,
            "draft_hard_share": DRAFT_HARD_SHARE,
        }

    def _recipe(self, steps: int, dropout: float, share: float) -> fit.Recipe:
        left_s = self._options.time_limit_s - (time.monotonic() - self._started)
        return fit.Recipe(
            steps=steps,
            batch_tokens=self._batch_tokens,
            learning_rate=LEARNING_RATE,
            weight_decay=WEIGHT_DECAY,
            dropout=dropout,
            eval_every_steps=max(1, steps // NUM_EVALUATIONS),
            budget_s=left_s * share,
            seed=self._options.seed,
        )

    def _fit(
        self, name: str, shape: fit.ModelShape, recipe: fit.Recipe, loss: fit.Loss
    ) -> tuple[LlamaForCausalLM, fit.FitResult]:
        model = fit.build_model(shape, recipe.seed)
        module: nn.Module = model
        module.to(self._device)
        sampler = fit.WindowSampler(self._tokens.train, recipe.seed, self._device)

        def show(point: fit.CurvePoint) -> None:
            losses = f"train {point.train:.3f}, held out {point.held_out:.3f} nats/token"
            _say(self._started, f"{name} step {point.step}/{recipe.steps}: {losses}")

        torch.use_deterministic_algorithms(self._options.repeatable)
        try:
            return model, fit.fit(model, sampler, self._held_out, recipe, loss, show)
        finally:
            torch.use_deterministic_algorithms(False)


def _shipped_tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(builtin_model_path() / "tokenizer.json"))


def _save_model(model: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path) -> nn.Module:
    """Writes the folder in bf16; returns what it loads as, in float32: what its users will get."""
    folder.mkdir(parents=True, exist_ok=True)
    module: nn.Module = model
    module.to(torch.bfloat16)
    model.save_pretrained(folder)
    module.to(torch.float32)
    (folder / "model.safetensors").chmod(0o644)
    generation = {"eos_token_id": [MESSAGE_END_ID, END_OF_TEXT_ID], "pad_token_id": PAD_ID}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    save_tokenizer(tokenizer, folder)
    shipped: nn.Module = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return shipped.eval()


def _say(started: float, text: str) -> None:
    print(f"[{time.monotonic() - started:6.1f} s] {text}", flush=True)


if __name__ == "__main__":
    main()
