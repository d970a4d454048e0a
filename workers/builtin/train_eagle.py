"""Trains an EAGLE-3 head for a target: the one that ships for the built-in model, or your own.

    python -m workers.builtin.train_eagle --texts FILE --out DIR [--device cpu] [--time-limit-s 300]
    python -m workers.builtin.train_eagle --texts FILE --out DIR --target FOLDER --taps 1 15 28

FILE is what eagle_texts wrote for that target. The head learns to foresee the target from its
states. Writes a folder in SpecForge's layout, for `--speculative eagle3:DIR`, with
training_report.json, at every point of the curve that is the best so far: a run that is ended early
leaves that one. Knows nothing of the engine that will serve the result.
"""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from workers.builtin import builtin_model_path, report
from workers.builtin.eagle_data import OwnText, TextBatches, TextReader, TextSet, frequent_tokens
from workers.builtin.eagle_fit import HeadFit, HeadPoint, HeadRecipe
from workers.builtin.eagle_model import HeadShape, TrainedHead
from workers.builtin.eagle_writer import BestHead

WEIGHT_DECAY = 0.05


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the whole recipe; see the module docstring."""
    options = _options(arguments)
    started = time.monotonic()
    folder = options.target or builtin_model_path()
    target: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    target.eval().requires_grad_(False).to(options.device)
    texts = TextSet.load(options.texts)
    held_out = texts.held_out[: options.num_held_out]
    draft_ids = frequent_tokens(texts.train, target.config.vocab_size, options.draft_vocab_size)
    train, judges = (
        TextBatches(own, options.batch_tokens, options.device) for own in (texts.train, held_out)
    )
    head = _new_head(options, target, draft_ids)
    recipe = _recipe(options, len(train))
    facts: dict[str, Any] = {
        "command": _command(options),
        "environment": report.environment(torch.device(options.device)),
        "num_parameters": sum(p.numel() for p in head.parameters()),
        "texts": _text_facts(texts.train, held_out, draft_ids),
        "recipe": asdict(recipe),
    }
    _say(started, json.dumps(facts))
    config = _shape(options, target).config(target.config.max_position_embeddings)
    best = BestHead(head, draft_ids, options.out, config, facts)

    def see(point: HeadPoint) -> None:
        best.see(point)
        _say(started, json.dumps(asdict(point)))

    reader = TextReader(target, options.taps, draft_ids)
    HeadFit(head, reader, train, judges, recipe).run(see)
    _say(started, f"wrote {options.out}")


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m workers.builtin.train_eagle",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--texts", type=Path, required=True, help="a file of eagle_texts")
    add("--out", type=Path, required=True, help="folder for the head")
    add("--target", type=Path, help="a transformers folder; else the built-in model")
    add("--device", default="cuda", help="cuda or cpu")
    add("--products", default="bfloat16", choices=("bfloat16", "float32"), help="of matrices")
    add("--seed", type=int, default=0, help="of initial weights and order")
    add("--num-held-out", type=int, default=480, help="texts that judge, at most")
    add("--epochs", type=float, default=40.0, help="over the texts, at most")
    add("--batch-tokens", type=int, default=16384, help="of an update, filling included")
    add("--learning-rate", type=float, default=2e-3)
    add("--unrolled", type=int, default=5, help="drafts deep, in training and in the report")
    add("--time-limit-s", type=float, default=300.0, help="of updates, which end annealed")
    add("--eval-every-s", type=float, default=20.0, help="between two points of the curve")
    add("--taps", type=int, nargs=3, default=(1, 3, 5), help="layers of the target, ascending")
    add("--draft-vocab-size", type=int, default=4096, help="the most frequent tokens")
    add("--intermediate-size", type=int, default=1024)
    add("--num-q-heads", type=int, default=8)
    add("--num-kv-heads", type=int, default=4)
    add("--head-dim", type=int, default=64)
    return parser.parse_args(arguments)


def _command(options: argparse.Namespace) -> str:
    words = ["python -m workers.builtin.train_eagle"]
    for key, value in vars(options).items():
        if value is not None:
            shown = " ".join(map(str, value)) if isinstance(value, list | tuple) else value
            words.append(f"--{key.replace('_', '-')} {shown}")
    return " ".join(words)


def _text_facts(
    train: Sequence[OwnText], held_out: Sequence[OwnText], draft_ids: Sequence[int]
) -> dict[str, Any]:
    known = set(draft_ids)
    said = [token for text in held_out for token in text.token_ids[text.num_prompt :]]
    return {
        "num": len(train),
        "num_tokens": sum(len(text.token_ids) for text in train),
        "num_said_tokens": sum(text.num_said for text in train),
        "num_held_out": len(held_out),
        "num_held_out_said_tokens": len(said),
        "said_in_draft_vocabulary": round(sum(map(known.__contains__, said)) / len(said), 4),
    }


def _shape(options: argparse.Namespace, target: Any) -> HeadShape:
    return HeadShape(
        vocab_size=target.config.vocab_size,
        draft_vocab_size=options.draft_vocab_size,
        target_hidden_size=target.config.hidden_size,
        intermediate_size=options.intermediate_size,
        num_q_heads=options.num_q_heads,
        num_kv_heads=options.num_kv_heads,
        head_dim=options.head_dim,
        rms_norm_eps=target.config.rms_norm_eps,
        rope_theta=float(target.config.rope_parameters["rope_theta"]),
        taps=tuple(options.taps),
    )


def _new_head(options: argparse.Namespace, target: Any, draft_ids: Sequence[int]) -> TrainedHead:
    torch.manual_seed(options.seed)
    head: nn.Module = TrainedHead(
        _shape(options, target), target.get_input_embeddings().weight.detach()
    )
    head.to(options.device)
    assert isinstance(head, TrainedHead), "to() gives the module back"
    rows = target.get_output_embeddings().weight.detach()[list(draft_ids)]
    head.begin_as(target.model.norm.weight.detach(), rows)
    return head


def _recipe(options: argparse.Namespace, num_batches: int) -> HeadRecipe:
    return HeadRecipe(
        num_updates=max(1, round(options.epochs * num_batches)),
        num_drafts=options.unrolled,
        batch_tokens=options.batch_tokens,
        learning_rate=options.learning_rate,
        weight_decay=WEIGHT_DECAY,
        eval_every_s=options.eval_every_s,
        budget_s=options.time_limit_s,
        products=options.products,
        seed=options.seed,
    )


def _say(started: float, text: str) -> None:
    print(f"[{time.monotonic() - started:6.1f} s] {text}", flush=True)


if __name__ == "__main__":
    main()
