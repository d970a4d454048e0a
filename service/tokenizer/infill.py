"""Fill in the middle: the marks that a model's tokenizer has for text before and behind a hole.

Prefix, suffix and then the middle, which the model writes, as the papers of these models have it
(Bavarian et al., "Efficient Training of Language Models to Fill in the Middle", 2022).
"""

from dataclasses import dataclass

from tokenizers import Tokenizer


@dataclass(frozen=True, slots=True)
class InfillMarks:
    """What stands before the prefix, before the suffix and before the middle."""

    prefix: str
    suffix: str
    middle: str

    def joined(self, prefix: str, suffix: str) -> str:
        return f"{self.prefix}{prefix}{self.suffix}{suffix}{self.middle}"


_FAMILIES = (
    # Qwen-Coder
    InfillMarks("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    # StarCoder, SantaCoder with its own hyphens
    InfillMarks("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    InfillMarks("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    # DeepSeek-Coder
    InfillMarks("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
)


def infill_marks_of(tokenizer: Tokenizer) -> InfillMarks | None:
    """None where the tokenizer has none that are known as tokens."""
    for marks in _FAMILIES:
        texts = (marks.prefix, marks.suffix, marks.middle)
        if all(tokenizer.token_to_id(text) is not None for text in texts):
            return marks
    return None
