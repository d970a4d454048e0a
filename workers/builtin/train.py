"""Trains the model that ships with Tessera, and its draft, from the Python standard library.

    CUBLAS_WORKSPACE_CONFIG=:4096:8 python -m workers.builtin.train --out DIR

One command: corpus, tokenizer, target, draft (distilled from the target), held-out losses, and two
Hugging Face folders beside `training_report.json`. Seeded; the corpus digest in the report says
whether two runs read the same text. Knows nothing of the engine that will serve the result.
"""

import argparse
import json
import math
import platform
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from workers.builtin import fit
from workers.builtin.chat_examples import conversations, persona_conversations
from workers.builtin.corpus import Document, collect_corpus, corpus_digest, is_held_out
from workers.builtin.tokenizer import (
    END_OF_TEXT_ID,
    MESSAGE_END_ID,
    PAD_ID,
    VOCAB_SIZE,
    Message,
    render_chat,
    save_tokenizer,
    train_tokenizer,
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
TARGET_DROPOUT = 0.3  # 3 M tokens of text are few for 7 M parameters, and many for 1 M
DRAFT_DROPOUT = 0.0
DRAFT_HARD_SHARE = 0.25
TARGET_SHARE_OF_TIME = 0.65  # of what is left of the limit when its fit begins
DRAFT_SHARE_OF_TIME = 0.9
NUM_EVALUATIONS = 25
SMOKE_WINDOWS = 1

SAMPLE_PROMPTS = (
    "def __init__(self",
    "import os\nimport sys\n\ndef main(",
    "class Stack:\n    def push(self, item):\n        ",
)
SAMPLE_QUESTIONS = (
    "Hello!",
    "What does os.path.join do?",
    "What does len do?",
    "Write the function textwrap.dedent.",
)


@dataclass(frozen=True, slots=True)
class Tokens:
    """The corpus as token ids, split by whole files."""

    train: list[npt.NDArray[np.int64]]  # one array a document, end-of-text included
    held_out_text: npt.NDArray[np.int64]
    held_out_chat: npt.NDArray[np.int64]
    held_out_bytes: int  # of the documents behind held_out_text, separators not counted
    num_train_text_tokens: int
    unigram_loss: float  # nats per token of held_out_text


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the whole recipe; see the module docstring."""
    options = _options(arguments)
    started = time.monotonic()
    device = torch.device(options.device)

    documents = collect_corpus(options.stdlib)
    train_documents = [d for d in documents if not is_held_out(d.group)]
    held_out_documents = [d for d in documents if is_held_out(d.group)]
    chats = conversations(train_documents, options.seed)
    chats += persona_conversations(options.seed)
    tokenizer = train_tokenizer(
        [*(d.text for d in train_documents), *(render_chat(c) for c in chats[::4])]
    )
    tokens = _tokenize(tokenizer, train_documents, held_out_documents, chats, options.seed)
    _say(started, f"{len(documents)} documents, unigram {tokens.unigram_loss:.3f} nats/token")

    held_out = _windows(tokens.held_out_text, device)
    trainer = _Trainer(options, tokens, held_out, device, started)
    target, target_fit = trainer.target()
    draft, draft_fit = trainer.draft(target)

    report: dict[str, Any] = {
        "command": f"python -m workers.builtin.train --steps {options.steps}"
        f" --draft-steps {options.draft_steps} --device {options.device} --seed {options.seed}"
        f" --time-limit-s {options.time_limit_s:g}",
        "environment": _environment(device) | {"is_repeatable": options.repeatable},
        "corpus": _corpus_facts(documents, tokens, len(chats)),
        "recipe": trainer.settings(),
    }
    for name, model, fitted in (("target", target, target_fit), ("draft", draft, draft_fit)):
        folder = options.out / name
        shipped = _save_model(model, tokenizer, folder).to(device)
        report[name] = _model_facts(shipped, folder, fitted, tokens, held_out)
        report[name]["samples"] = _samples(shipped, tokenizer, device)
        _say(started, f"{name}: {json.dumps(report[name]['held_out'])}")
    report["draft"]["agreement_with_target"] = asdict(fit.agreement(target, draft, held_out))
    report["wall_s"] = round(time.monotonic() - started, 1)
    path = options.out / "training_report.json"
    path.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n")
    _say(started, f"wrote {path}")


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

        def report(point: fit.CurvePoint) -> None:
            losses = f"train {point.train:.3f}, held out {point.held_out:.3f} nats/token"
            _say(self._started, f"{name} step {point.step}/{recipe.steps}: {losses}")

        torch.use_deterministic_algorithms(self._options.repeatable)
        try:
            return model, fit.fit(model, sampler, self._held_out, recipe, loss, report)
        finally:
            torch.use_deterministic_algorithms(False)


def _tokenize(
    tokenizer: Tokenizer,
    train: Sequence[Document],
    held_out: Sequence[Document],
    chats: Sequence[Sequence[Message]],
    seed: int,
) -> Tokens:
    def encode(texts: Sequence[str]) -> list[npt.NDArray[np.int64]]:
        return [
            np.array([*encoding.ids, END_OF_TEXT_ID], dtype=np.int64)
            for encoding in tokenizer.encode_batch(list(texts))
        ]

    train_text = encode([d.text for d in train])
    held_out_text = np.concatenate(encode([d.text for d in held_out]))
    held_out_chats = [render_chat(c) for c in conversations(held_out, seed)]
    counts = np.bincount(np.concatenate(train_text), minlength=VOCAB_SIZE) + 1
    unigram = -np.log(counts / counts.sum())
    return Tokens(
        train=train_text + encode([render_chat(c) for c in chats]),
        held_out_text=held_out_text,
        held_out_chat=np.concatenate(encode(held_out_chats)),
        held_out_bytes=sum(len(d.text.encode()) for d in held_out),
        num_train_text_tokens=sum(map(len, train_text)),
        unigram_loss=float(unigram[held_out_text].mean()),
    )


def _windows(stream: npt.NDArray[np.int64], device: torch.device) -> Tensor:
    """The stream as (N, EVAL_WINDOW_TOKENS + 1), each window sharing one token with the next.

    All of it on a GPU, the first few windows on a CPU, where only a smoke run is wanted.
    """
    tokens = torch.from_numpy(stream).to(device)
    windows = tokens.unfold(0, fit.EVAL_WINDOW_TOKENS + 1, fit.EVAL_WINDOW_TOKENS)
    return windows if device.type == "cuda" else windows[:SMOKE_WINDOWS]


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


def _model_facts(
    shipped: nn.Module,
    folder: Path,
    fitted: fit.FitResult,
    tokens: Tokens,
    held_out: Tensor,
) -> dict[str, Any]:
    loss = fit.held_out_loss(shipped, held_out)
    chat_loss = fit.held_out_loss(shipped, _windows(tokens.held_out_chat, held_out.device))
    tokens_per_byte = len(tokens.held_out_text) / tokens.held_out_bytes
    return {
        "num_parameters": sum(p.numel() for p in shipped.parameters()),
        "weights_bytes": (folder / "model.safetensors").stat().st_size,
        "held_out": {
            "num_windows": len(held_out),
            "nats_per_token": loss,
            "bits_per_byte": loss * tokens_per_byte / math.log(2),
            "chat_nats_per_token": chat_loss,
            "unigram_nats_per_token": tokens.unigram_loss,
            "unigram_bits_per_byte": tokens.unigram_loss * tokens_per_byte / math.log(2),
        },
        "chosen_step": fitted.chosen.step,
        "lowest_held_out_in_curve": min(point.held_out for point in fitted.curve),
        "wall_s": round(fitted.wall_s, 1),
        "curve": [asdict(point) for point in fitted.curve],
    }


@torch.no_grad()
def _samples(shipped: Any, tokenizer: Tokenizer, device: torch.device) -> dict[str, str]:
    """Greedy continuations of a few prompts, so that a reader of the report sees what it says."""
    questions = [
        render_chat([Message("user", question)]) + "<|im_start|>assistant\n"
        for question in SAMPLE_QUESTIONS
    ]
    samples: dict[str, str] = {}
    for prompt in (*SAMPLE_PROMPTS, *questions):
        inputs = torch.tensor([tokenizer.encode(prompt).ids], device=device)
        output = shipped.generate(inputs, max_new_tokens=80, do_sample=False)
        samples[prompt] = tokenizer.decode(
            output[0, inputs.shape[1] :].tolist(), skip_special_tokens=False
        )
    return samples


def _corpus_facts(
    documents: Sequence[Document], tokens: Tokens, num_conversations: int
) -> dict[str, Any]:
    return {
        "sha256": corpus_digest(documents),
        "num_documents": len(documents),
        "num_bytes": sum(len(d.text.encode()) for d in documents),
        "held_out_documents": sum(is_held_out(d.group) for d in documents),
        "held_out_bytes": tokens.held_out_bytes,
        "held_out_tokens": len(tokens.held_out_text),
        "train_text_tokens": tokens.num_train_text_tokens,
        "train_tokens": sum(map(len, tokens.train)),
        "train_conversations": num_conversations,
    }


def _environment(device: torch.device) -> dict[str, object]:
    is_cuda = device.type == "cuda"
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": torch.cuda.get_device_name(device) if is_cuda else "cpu",
    }


def _say(started: float, text: str) -> None:
    print(f"[{time.monotonic() - started:6.1f} s] {text}", flush=True)


if __name__ == "__main__":
    main()
