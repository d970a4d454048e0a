"""SpeculativeConfig: who proposes drafts, how many, and who chooses how many. Frozen, checked once.

Knows no tensor and no request.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self, get_args

from workers.errors import ConfigError

Method = Literal["ngram", "suffix", "draft", "eagle3", "mtp", "dflash"]
DraftPolicyName = Literal["adaptive", "fixed"]
DraftQuantization = Literal["fp8"]

MAX_DRAFT_TOKENS = 32
METHODS: tuple[Method, ...] = get_args(Method)
METHODS_WITH_MODEL: frozenset[Method] = frozenset({"draft", "eagle3", "dflash"})
"""What needs a MODEL behind a colon, as EngineConfig.model is given, or for eagle3 the folder of a
head, for dflash that of a block drafter; others take none."""

METHODS_WITH_TREES: frozenset[Method] = frozenset({"suffix", "draft", "eagle3", "mtp"})
"""Who may propose several drafts for one place."""

METHODS_BESIDE: frozenset[Method] = METHODS_WITH_MODEL | {"mtp"}
"""What runs a model or a layer beside the served model's own."""

METHODS_READING_STATES: frozenset[Method] = frozenset({"eagle3", "mtp", "dflash"})
"""What reads states of the served model, which only native classes hand over."""

METHODS_ON_CPU_ONLY: frozenset[Method] = frozenset({"dflash"})

_UNROUNDED: dict[Method, str] = {
    "ngram": "runs no model whose weights could be rounded",
    "suffix": "runs no model whose weights could be rounded",
    "mtp": "is a layer of the model's own checkpoint and is stored as that is: see quantization",
    "dflash": "runs on CPU only so far, where rounded weights save nothing",
}
"""Whose weights draft_quantization cannot round, and why."""

_CHOICES = [f"{name}:MODEL" if name in METHODS_WITH_MODEL else name for name in METHODS]


def check_draft_limits(max_draft_tokens: int, policy: DraftPolicyName) -> None:
    """Raises ConfigError."""
    if not 1 <= max_draft_tokens <= MAX_DRAFT_TOKENS:
        raise ConfigError(
            f"max_draft_tokens must lie in [1, {MAX_DRAFT_TOKENS}], got {max_draft_tokens}"
        )
    if policy not in get_args(DraftPolicyName):
        raise ConfigError(
            f"draft_policy {policy!r} is not known, but {', '.join(get_args(DraftPolicyName))}"
        )


def check_tree(tree: Sequence[int]) -> None:
    """tree: drafts at each depth, none for chains. Raises ConfigError."""
    if any(width < 1 for width in tree) or sum(tree) > MAX_DRAFT_TOKENS:
        raise ConfigError(
            f"draft_tree must have at least 1 draft at each depth and {MAX_DRAFT_TOKENS} in all, "
            f"got {list(tree)}"
        )


def check_quantization(quantization: str, speculation: "SpeculativeConfig | None") -> None:
    """Of what drafts. Raises ConfigError where there are no weights of its own to round."""
    asked = f"draft_quantization={quantization!r}"
    if quantization not in get_args(DraftQuantization):
        raise ConfigError(f"{asked} is not known, but {', '.join(get_args(DraftQuantization))}")
    if speculation is None:
        raise ConfigError(
            f"{asked} and nobody who proposes drafts: name a model or a head by speculative, or "
            "leave it out"
        )
    if speculation.method in _UNROUNDED:
        raise ConfigError(f"{asked}: {speculation.method} {_UNROUNDED[speculation.method]}")


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """method: who proposes. model: by which model, None where by none. max_draft_tokens: of a row
    and step, 1 to MAX_DRAFT_TOKENS. policy: "adaptive" chooses the length of every step by
    measurement, none included; "fixed" takes max_draft_tokens always. tree: of drafts that are a
    tree, how many it has at each depth; they are the max_draft_tokens.
    """

    method: Method
    max_draft_tokens: int
    policy: DraftPolicyName
    model: str | None = None
    tree: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_draft_limits(self.max_draft_tokens, self.policy)
        if (self.model is not None) != (self.method in METHODS_WITH_MODEL):
            raise ConfigError(
                f"speculative {self.method!r} takes {'a' if self.model is None else 'no'} model"
            )
        if self.tree and self.method not in METHODS_WITH_TREES:
            able = ", ".join(sorted(METHODS_WITH_TREES))
            raise ConfigError(
                f"draft_tree={list(self.tree)}: {self.method} proposes chains, trees do {able}"
            )

    @classmethod
    def parse(
        cls,
        text: str,
        max_draft_tokens: int,
        policy: DraftPolicyName,
        tree: tuple[int, ...] = (),
    ) -> Self:
        """text: METHOD or METHOD:MODEL, as the command line takes it. A tree has its own number of
        drafts. Raises ConfigError, which names the choices."""
        check_tree(tree)
        most = sum(tree) or max_draft_tokens
        name, colon, model = text.partition(":")
        method = next((known for known in METHODS if known == name), None)
        if method is None:
            raise ConfigError(f"speculative {text!r}: the method is one of {', '.join(_CHOICES)}")
        if method in METHODS_WITH_MODEL:
            if not model:
                raise ConfigError(f"speculative {text!r}: {method} needs a model, {name}:MODEL")
            return cls(method, most, policy, model, tree)
        if colon:
            raise ConfigError(f"speculative {text!r}: {method} runs no model, leave :{model} out")
        return cls(method, most, policy, None, tree)
