"""GenerationRequest: one client request, free of its protocol. Frozen values, no behaviour."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from service.chat.options import ChatOptions
from service.handler.beams import BeamOptions
from service.handler.repetition import RepetitionDetection
from service.tokenizer.constraints import Constraint
from service.tokenizer.jobs import EncodeChat, EncodeText, EncodeTexts
from workers.engine.content import ContentSpan
from workers.engine.encoder_input import SourceFeatures
from workers.engine.media import MediaItem
from workers.sampling.params import SamplingParams


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """A prompt that is token ids already."""

    token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class AudioPrompt:
    """What a model with an encoder for audio hears, and how its decoder begins."""

    features: SourceFeatures
    token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class ImagePrompt:
    """A chat with images that was tokenised. images: each once. spans: where they stand."""

    token_ids: Sequence[int]
    spans: list[ContentSpan]
    images: list[MediaItem]


@dataclass(frozen=True, slots=True)
class EncoderPrompt:
    """A text or a pair that was tokenised for an encoder. second_start: of the second's tokens, 0
    where there is one text."""

    token_ids: Sequence[int]
    second_start: int


Prompt = (
    EncodeText | EncodeTexts | EncodeChat | TokenPrompt | AudioPrompt | ImagePrompt | EncoderPrompt
)


@dataclass(frozen=True, slots=True)
class TextOptions:
    """How tokens become text.

    stop: strings that end a choice, hidden unless include_stop. skip_special_tokens hides special
    tokens. echo: the text and, with logprobs, the tokens of the prompt come first.
    """

    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    echo: bool = False


@dataclass(frozen=True, slots=True)
class NamedConstraint:
    """What the output has to be. param: what the client calls it."""

    constraint: Constraint
    param: str


@dataclass(frozen=True, slots=True)
class EmbeddingOptions:
    """What vector is made of a prompt. dimensions: its first values that are kept; None: all.
    is_normalised: to unit length; scores: by their activation. task: what has to come of it; None:
    what the model gives."""

    dimensions: int | None = None
    is_normalised: bool = True
    task: Literal["embed", "classify"] | None = None


AS_MANY_AS_FIT = -1


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """Everything a client may ask of one generation.

    model: "" means the only model there is. n: choices per prompt; choice i of a prompt is seeded
    with sampling.seed + i. sampling.max_tokens None: up to the context's end. default_max_tokens:
    used, as far as the context has room, when sampling.max_tokens is None. is_scoring_only: nothing
    is to be generated, the prompt's log probabilities are all that is wanted (max_tokens = 0).
    unset: fields of sampling that the client left to its defaults, which a model may have of its
    own. truncate_prompt_tokens: keep that many tokens of the prompt's end, or AS_MANY_AS_FIT.
    keeps_beginning: of the prompt's beginning instead; None: only where an encoder reads it.
    request_id: "" draws one. session_id: requests of one session go to one replica; "" is what the
    call's header says. constraint: of every choice. embedding: nothing is generated, each prompt
    becomes a vector. chat: None for what is no chat. num_best: the likeliest so many of each
    prompt's n choices are the answer; None: all are. hides_logprobs: those of the sampling are for
    that alone. repetition: ends a choice. stream_interval: tokens between two deltas of a choice.
    bad_words: texts that no choice has; the sampling's own are made of them. beams: the choices are
    the n best beams of a search. max_draft_tokens: drafts of a step, 0 for none; None: as many as
    the engine verifies.
    """

    prompts: tuple[Prompt, ...]
    sampling: SamplingParams
    model: str = ""
    n: int = 1
    text: TextOptions = TextOptions()
    default_max_tokens: int | None = None
    is_scoring_only: bool = False
    truncate_prompt_tokens: int | None = None
    keeps_beginning: bool | None = None
    priority: int = 0
    cache_salt: str = ""
    request_id: str = ""
    session_id: str = ""
    constraint: NamedConstraint | None = None
    embedding: EmbeddingOptions | None = None
    chat: ChatOptions | None = None
    unset: frozenset[str] = frozenset()
    num_best: int | None = None
    hides_logprobs: bool = False
    repetition: RepetitionDetection | None = None
    stream_interval: int = 1
    bad_words: tuple[str, ...] = ()
    beams: BeamOptions | None = None
    max_draft_tokens: int | None = None
