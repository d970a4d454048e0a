"""What a training run says of itself: figures of the shipped weights, samples, environment."""

import json
import math
import platform
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer
from torch import Tensor, nn

from workers.builtin import fit
from workers.builtin.call_scores import Complete, Example
from workers.builtin.corpus import Document, corpus_digest
from workers.builtin.data import Texts, Tokens, made_digest
from workers.builtin.tokenizer import PAD_ID, Message, render_chat

MAX_ANSWER_TOKENS = 160
_BATCH_SIZE = 256

_SAMPLE_PROMPTS = (
    "def __init__(self",
    "import os\nimport sys\n\ndef main(",
    "class Stack:\n    def push(self, item):\n        ",
)
_WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
_SAMPLE_QUESTIONS = (
    ("Hello!", False),
    ("What does os.path.join do?", False),
    ("What does len do?", False),
    ("Write the function textwrap.dedent.", False),
    ("Do I need a coat in Paris?", True),
    ("What is the weather in Oslo and in Timbuktu?", True),
    ("What does os.path.join do?", True),
    ("Ada is 36 years old and lives in London. Answer in JSON with the keys name and age.", False),
)


def model_facts(
    shipped: nn.Module, folder: Path, fitted: fit.FitResult, tokens: Tokens, held_out: Tensor
) -> dict[str, Any]:
    """Sizes, held-out losses and the loss curve. held_out: windows of text."""
    loss = fit.held_out_loss(shipped, held_out)
    chat_loss = fit.held_out_loss(shipped, windows(tokens.held_out_chat, held_out.device))
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


def windows(stream: Any, device: torch.device) -> Tensor:
    """The stream as (N, EVAL_WINDOW_TOKENS + 1), each window sharing one token with the next.

    All of it on a GPU, the first window on a CPU, where only a smoke run is wanted.
    """
    tokens = torch.from_numpy(stream).to(device)
    unfolded = tokens.unfold(0, fit.EVAL_WINDOW_TOKENS + 1, fit.EVAL_WINDOW_TOKENS)
    return unfolded if device.type == "cuda" else unfolded[:1]


def greedy(shipped: Any, tokenizer: Tokenizer, device: torch.device) -> Complete:
    """Greedy continuations in padded batches, prompts of like length together."""

    @torch.no_grad()
    def complete(prompts: Sequence[str]) -> list[str]:
        ids = [encoding.ids for encoding in tokenizer.encode_batch(list(prompts))]
        order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
        texts = [""] * len(ids)
        for first in range(0, len(order), _BATCH_SIZE):
            rows = order[first : first + _BATCH_SIZE]
            width = max(len(ids[row]) for row in rows)
            padded = [[PAD_ID] * (width - len(ids[row])) + ids[row] for row in rows]
            mask = [[0] * (width - len(ids[row])) + [1] * len(ids[row]) for row in rows]
            output = shipped.generate(
                torch.tensor(padded, device=device),
                attention_mask=torch.tensor(mask, device=device),
                max_new_tokens=MAX_ANSWER_TOKENS,
                do_sample=False,
            )
            for row, tokens in zip(rows, output[:, width:].tolist(), strict=True):
                text = tokenizer.decode(tokens, skip_special_tokens=False)
                texts[row] = text.partition("<|pad|>")[0]
        return texts

    return complete


def samples(complete: Complete) -> dict[str, str]:
    """Greedy continuations of a few prompts, so that a reader of the report sees what it says."""
    questions = [
        render_chat([Message("user", text)], (_WEATHER,) if has_tool else ())
        + "<|im_start|>assistant\n"
        for text, has_tool in _SAMPLE_QUESTIONS
    ]
    prompts = [*_SAMPLE_PROMPTS, *questions]
    return dict(zip(prompts, complete(prompts), strict=True))


def transcript(examples: Sequence[Example], said: Sequence[str], num: int) -> str:
    """What was said to the first `num` examples of each kind, beside what should have been."""
    lines: list[str] = []
    seen: Counter[str] = Counter()
    for example, text in zip(examples, said, strict=True):
        seen[example.kind] += 1
        if seen[example.kind] <= num:
            asked = example.conversation.messages[-2].content
            lines.append(f"[{example.kind}] {asked!r}")
            lines.append(f"    wanted {render_chat([example.answer])!r}")
            lines.append(f"    said   {text!r}")
    return "\n".join(lines)


def corpus_facts(documents: Sequence[Document], texts: Texts, tokens: Tokens) -> dict[str, Any]:
    """Sizes and digests of what was read and made."""
    return {
        "sha256": corpus_digest(documents),
        "num_documents": len(documents),
        "num_bytes": sum(len(d.text.encode()) for d in documents),
        "held_out_documents": len(texts.held_out),
        "held_out_bytes": tokens.held_out_bytes,
        "held_out_tokens": len(tokens.held_out_text),
        "train_text_tokens": tokens.num_train_text_tokens,
        "train_tokens": sum(map(len, tokens.train)),
        "train_conversations": len(texts.chats),
        "made_conversations": len(texts.made),
        "made_tokens": tokens.num_made_tokens,
        "made_sha256": made_digest(texts.made),
    }


def environment(device: torch.device) -> dict[str, object]:
    """Versions and the device."""
    is_cuda = device.type == "cuda"
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": torch.cuda.get_device_name(device) if is_cuda else "cpu",
    }


def write(report: dict[str, Any], path: Path) -> None:
    """As JSON."""
    path.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n")
