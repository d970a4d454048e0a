"""SpeculativeConfig: who proposes drafts, how many, and who chooses how many. Frozen, checked once.

Knows no tensor and no request.
"""

from dataclasses import dataclass
from typing import Literal, Self, get_args

from workers.errors import ConfigError

Method = Literal["ngram", "suffix"]
DraftPolicyName = Literal["adaptive", "fixed"]

MAX_DRAFT_TOKENS = 32
METHODS: tuple[Method, ...] = get_args(Method)
METHODS_WITH_MODEL: frozenset[str] = frozenset()
"""Methods that take a MODEL behind a colon, and need one."""


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """method: who proposes. model: the folder or built-in name of what it runs; "" where it runs
    none. max_draft_tokens: of a row and step, 1 to MAX_DRAFT_TOKENS. policy: "adaptive" chooses the
    length of every step by measurement, none included; "fixed" takes max_draft_tokens always.
    """

    method: Method
    model: str
    max_draft_tokens: int
    policy: DraftPolicyName

    def __post_init__(self) -> None:
        if not 1 <= self.max_draft_tokens <= MAX_DRAFT_TOKENS:
            raise ConfigError(
                f"max_draft_tokens must lie in [1, {MAX_DRAFT_TOKENS}], got {self.max_draft_tokens}"
            )
        if self.policy not in get_args(DraftPolicyName):
            raise ConfigError(
                f"draft_policy {self.policy!r} is not known, but "
                f"{', '.join(get_args(DraftPolicyName))}"
            )

    @classmethod
    def parse(cls, text: str, max_draft_tokens: int, policy: DraftPolicyName) -> Self:
        """text: METHOD or METHOD:MODEL, as the command line takes it. Raises ConfigError, which
        names the choices."""
        name, colon, model = text.partition(":")
        method = next((known for known in METHODS if known == name), None)
        if method is None:
            raise ConfigError(f"speculative {text!r}: the method is one of {choices()}")
        if method in METHODS_WITH_MODEL and not model:
            raise ConfigError(f"speculative {text!r}: name the model it runs, {method}:MODEL")
        if method not in METHODS_WITH_MODEL and colon:
            raise ConfigError(f"speculative {text!r}: {method} runs no model, leave :{model} out")
        return cls(method, model, max_draft_tokens, policy)


def choices() -> str:
    """What may be asked for, as messages and help texts name it."""
    return ", ".join(
        f"{method}:MODEL" if method in METHODS_WITH_MODEL else method for method in METHODS
    )
