"""Trains an EAGLE-3 head for a target: the one that ships for the built-in model, or your own.

    python -m workers.builtin.train_eagle --out DIR [--device cpu|cuda]
    python -m workers.builtin.train_eagle --out DIR --target FOLDER --prompts FILE --taps 1 15 28

The target speaks greedily behind prompts; the head learns to foresee it from its states. Writes a
folder in SpecForge's layout, for `--speculative eagle3:DIR`, and training_report.json. Knows
nothing of the engine that will serve the result.
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
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from workers.builtin import builtin_model_path, eagle_fit, fit, report
from workers.builtin.eagle_data import OwnText, ReadBatch, TextReader, frequent_tokens, own_texts
from workers.builtin.eagle_model import HeadShape, TrainedHead
from workers.builtin.eagle_prompts import Prompts, builtin_prompts, file_prompts

WEIGHT_DECAY = 0.05
NUM_EVALUATIONS = 10
_GENERATED_AT_ONCE = 128


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the whole recipe; see the module docstring."""
    options = _options(arguments)
    started = time.monotonic()
    folder = options.target or builtin_model_path()
    target: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    target.eval().requires_grad_(False).to(options.device)
    prompts = _prompts(options, Tokenizer.from_file(str(folder / "tokenizer.json")))
    ends = _end_ids(target)
    texts, held_out = (
        list(own_texts(target, own, options.answer_tokens, ends, _GENERATED_AT_ONCE))
        for own in (prompts.train, prompts.held_out)
    )
    num_said = sum(len(text.token_ids) - text.num_prompt for text in texts)
    _say(started, f"the target said {num_said} tokens behind {len(texts)} prompts")
    draft_ids = frequent_tokens(texts, target.config.vocab_size, options.draft_vocab_size)
    reader = TextReader(target, options.taps, draft_ids)
    batches = _read(reader, texts, options.batch_tokens)
    held_out_batches = _read(reader, held_out, options.batch_tokens)
    _say(started, f"{len(batches)} batches are read")

    head = _new_head(options, target, draft_ids)
    recipe = _recipe(options, len(batches))
    curve = eagle_fit.fit_head(
        head,
        batches,
        held_out_batches,
        recipe,
        options.unrolled,
        lambda point: _say(started, json.dumps(asdict(point))),
    )
    shape = _shape(options, target)
    save_head(head, draft_ids, options.out, shape, target.config.max_position_embeddings)
    facts: dict[str, Any] = {
        "command": "python -m workers.builtin.train_eagle "
        + " ".join(f"--{key.replace('_', '-')} {value}" for key, value in vars(options).items()),
        "environment": report.environment(torch.device(options.device)),
        "num_parameters": sum(p.numel() for p in head.parameters()),
        "weights_bytes": (options.out / "model.safetensors").stat().st_size,
        "texts": {
            "num": len(texts),
            "num_held_out": len(held_out),
            "num_said_tokens": num_said,
            "said_in_draft_vocabulary": _coverage(held_out_batches),
        },
        "recipe": asdict(recipe),
        "held_out": asdict(curve[-1].acceptance),
        "curve": [asdict(point) for point in curve],
        "wall_s": round(time.monotonic() - started, 1),
    }
    report.write(facts, options.out / "training_report.json")
    _say(started, f"wrote {options.out}")


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m workers.builtin.train_eagle",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder for the head")
    add("--target", type=Path, help="a transformers folder; else the built-in model")
    add("--prompts", type=Path, help="a file with a prompt a line; else the built-in corpus")
    add("--stdlib", type=Path, default=Path(sysconfig.get_paths()["stdlib"]), help="as of train")
    add("--device", default="cuda", help="cuda or cpu")
    add("--seed", type=int, default=0, help="of prompts, initial weights and order")
    add("--num-prompts", type=int, default=6000, help="held-out ones come on top")
    add("--answer-tokens", type=int, default=128, help="that the target says at most")
    add("--epochs", type=float, default=20.0, help="over what it said")
    add("--batch-tokens", type=int, default=4096, help="of an update, filling included")
    add("--learning-rate", type=float, default=2e-3)
    add("--unrolled", type=int, default=4, help="drafts deep, in training and in the report")
    add("--time-limit-s", type=float, default=600.0, help="of updates: anneal and stop beyond this")
    add("--taps", type=int, nargs=3, default=(1, 3, 5), help="layers of the target, ascending")
    add("--draft-vocab-size", type=int, default=768, help="the most frequent tokens")
    add("--intermediate-size", type=int, default=320)
    add("--num-q-heads", type=int, default=4)
    add("--num-kv-heads", type=int, default=2)
    add("--head-dim", type=int, default=64)
    return parser.parse_args(arguments)


def _prompts(options: argparse.Namespace, tokenizer: Tokenizer) -> Prompts:
    if options.prompts is not None:
        return file_prompts(tokenizer, options.prompts, options.num_prompts, options.seed)
    return builtin_prompts(tokenizer, options.stdlib, options.num_prompts, options.seed)


def _end_ids(target: Any) -> list[int]:
    ends = target.generation_config.eos_token_id
    return list(ends) if isinstance(ends, list) else [ends]


def _read(reader: TextReader, texts: Sequence[OwnText], batch_tokens: int) -> list[ReadBatch]:
    """Texts of like length together."""
    order, batches = sorted(texts, key=lambda text: len(text.token_ids)), list[ReadBatch]()
    while order:
        num = max(1, batch_tokens // len(order[-1].token_ids))
        batches.append(reader.read(order[-num:]))
        del order[-num:]
    return batches


def _coverage(batches: Sequence[ReadBatch]) -> float:
    said = sum(int(batch.is_said.sum()) for batch in batches)
    known = sum(int((batch.is_said & (batch.likeliest >= 0)).sum()) for batch in batches)
    return round(known / max(said, 1), 4)


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


def _recipe(options: argparse.Namespace, num_batches: int) -> fit.Recipe:
    steps = max(1, round(options.epochs * num_batches))
    return fit.Recipe(
        steps=steps,
        batch_tokens=options.batch_tokens,
        learning_rate=options.learning_rate,
        weight_decay=WEIGHT_DECAY,
        dropout=0.0,
        eval_every_steps=max(1, steps // NUM_EVALUATIONS),
        budget_s=options.time_limit_s,
        seed=options.seed,
    )


def save_head(
    head: TrainedHead,
    draft_ids: Sequence[int],
    folder: Path,
    shape: HeadShape,
    max_position_embeddings: int,
) -> None:
    """In bf16. draft_ids: ascending, the target's of the head's tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    ids = torch.tensor(draft_ids)
    known = torch.zeros(shape.vocab_size, dtype=torch.bool)
    known[ids] = True
    tensors: dict[str, Tensor] = {
        name: tensor.detach().cpu().bfloat16().contiguous()
        for name, tensor in head.state_dict().items()
    }
    tensors |= {"d2t": ids - torch.arange(len(ids)), "t2d": known}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    facts = shape.config(max_position_embeddings)
    (folder / "config.json").write_text(json.dumps(facts, indent=2) + "\n")


def _say(started: float, text: str) -> None:
    print(f"[{time.monotonic() - started:6.1f} s] {text}", flush=True)


if __name__ == "__main__":
    main()
