"""The request of POST /generate, and what it means to the handler."""

from collections.abc import Iterator
from typing import Annotated, Any, Self

import msgspec
from pydantic import BeforeValidator, model_validator

from service.api.openai.constraints import Schema
from service.api.openai.parameters import (
    Count,
    Int32,
    LenientModel,
    PositiveInt32,
    SamplingFields,
    Seed,
    Speculative,
    TokenIdList,
    max_draft_tokens,
)
from service.api.openai.prompts import PromptValue, prompts_of
from service.api.openai.sampling import distinct, shared_sampling, unset_sampling
from service.api.openai.structural_tags import StructuralTag, tag_object
from service.errors import ApiError, ApiErrorCode
from service.handler.requests import GenerationRequest, NamedConstraint, Prompt, TextOptions
from service.tokenizer.constraints import Constraint, JsonSchema, Lark, Regex
from service.tokenizer.jobs import EncodeText
from workers.sampling.params import SamplingParams

DEFAULT_MAX_NEW_TOKENS = 128
PARAMS = {
    **{name: f"sampling_params.{name}" for name in SamplingFields.model_fields},
    "max_tokens": "sampling_params.max_new_tokens",
    "min_tokens": "sampling_params.min_new_tokens",
    "seed": "sampling_params.sampling_seed",
    "prompt": "text",
    "logprobs": "top_logprobs_num",
    "prompt_logprobs": "top_logprobs_num",
    "logprob_token_ids": "token_ids_logprob",
    "request_id": "rid",
    "cache_salt": "extra_key",
}
"""SGLang's names of what others call otherwise; see params_named()."""
_SAMPLING_HARMLESS: dict[str, tuple[Any, ...]] = {
    "beam_width": (None, 1),
    "custom_params": (None,),
    "stop_regex": (None, []),
    "stream_interval": (None, 1),
}
_HARMLESS: dict[str, tuple[Any, ...]] = {
    "audio_data": (None,),
    "background": (None, False),
    "bootstrap_host": (None,),
    "bootstrap_port": (None,),
    "bootstrap_room": (None,),
    "custom_logit_processor": (None,),
    "data_parallel_rank": (None,),
    "image_data": (None,),
    "input_embeds": (None,),
    "log_metrics": (None, True),
    "lora_path": (None,),
    "modalities": (None,),
    "return_bytes": (None, False),
    "return_hidden_states": (None, False),
    "return_routed_experts": (None, False),
    "session_params": (None,),
    "video_data": (None,),
}


class GenerateSampling(SamplingFields):
    """SGLang's names. At most one of json_schema, regex, ebnf, which may be Lark too, and
    structural_tag.

    no_stop_trim: the stop string that ends a choice is part of its text.
    """

    harmless = _SAMPLING_HARMLESS
    prefix = "sampling_params."

    max_new_tokens: PositiveInt32 | None = None
    min_new_tokens: Count | None = None
    no_stop_trim: bool | None = None
    sampling_seed: Seed | None = None
    json_schema: Schema | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: Annotated[StructuralTag | None, BeforeValidator(tag_object)] = None

    @model_validator(mode="after")
    def _has_one_constraint_at_most(self) -> Self:
        found = [named.param for named in self._constraints()]
        if len(found) > 1:
            raise _invalid(f"{' and '.join(found)} exclude each other: keep one", found[1])
        return self

    @property
    def constraint(self) -> NamedConstraint | None:
        return next(self._constraints(), None)

    def _constraints(self) -> Iterator[NamedConstraint]:
        made: tuple[tuple[str, Constraint | None], ...] = (
            ("json_schema", None if self.json_schema is None else JsonSchema(self.json_schema)),
            ("regex", None if self.regex is None else Regex(self.regex)),
            ("ebnf", None if self.ebnf is None else Lark(self.ebnf)),
            (
                "structural_tag",
                None if self.structural_tag is None else self.structural_tag.constraint,
            ),
        )
        for name, constraint in made:
            if constraint is not None:
                yield NamedConstraint(constraint, f"sampling_params.{name}")


def _or_defaults(value: Any) -> Any:
    """null asks for nothing."""
    return {} if value is None else value


class GenerateBody(LenientModel):
    """text or input_ids: one prompt, or several. return_logprob: log probabilities of the output,
    and from logprob_start_len 0 or more on of the prompt too, which is not streamed.
    top_logprobs_num: alternatives. token_ids_logprob: of these tokens instead. rid: becomes the
    answer's id. model: may be left out where only one can be meant. speculative: as for
    completions.
    """

    harmless = _HARMLESS

    text: PromptValue | None = None
    input_ids: PromptValue | None = None
    sampling_params: Annotated[GenerateSampling, BeforeValidator(_or_defaults)] = GenerateSampling()
    stream: bool | None = None
    return_logprob: bool | None = None
    logprob_start_len: Int32 | None = None
    top_logprobs_num: Count | None = None
    token_ids_logprob: TokenIdList | None = None
    return_text_in_logprobs: bool | None = None
    rid: str | None = None
    model: str | None = None
    priority: Int32 | None = None
    extra_key: str | None = None
    speculative: Speculative = None

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> Self:
        if (self.text is None) == (self.input_ids is None):
            raise _invalid("give text or input_ids, and not both", "text")
        if self.text is not None and not _is_text(self.text):
            raise _invalid("text must be a text or texts", "text")
        if self.input_ids is not None and _is_text(self.input_ids):
            raise _invalid("input_ids must be token ids or lists of them", "input_ids")
        if self.stream and self.wants_prompt_logprobs:
            raise _invalid("logprob_start_len cannot be streamed", "logprob_start_len")
        return self

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        given = self.input_ids if self.text is None else self.text
        return () if given is None else prompts_of(given, EncodeText)

    @property
    def is_single(self) -> bool:
        """Whether the answer is one object, not a list."""
        given = self.input_ids if self.text is None else self.text
        is_one = isinstance(given, str) or (bool(given) and isinstance((given or [0])[0], int))
        return is_one and (self.sampling_params.n or 1) == 1

    @property
    def wants_prompt_logprobs(self) -> bool:
        """-1, the default, is behind the prompt."""
        start = -1 if self.logprob_start_len is None else self.logprob_start_len
        return bool(self.return_logprob) and start >= 0

    def to_generation_request(self) -> GenerationRequest:
        """Raises ApiError."""
        given = self.sampling_params
        return GenerationRequest(
            prompts=self.prompts,
            sampling=self._sampling(),
            model=self.model or "",
            n=1 if given.n is None else given.n,
            text=TextOptions(
                stop=given.stops,
                include_stop=bool(given.no_stop_trim),
                skip_special_tokens=given.skip_special_tokens is not False,
            ),
            default_max_tokens=DEFAULT_MAX_NEW_TOKENS,
            priority=self.priority or 0,
            cache_salt=self.extra_key or "",
            request_id=self.rid or "",
            constraint=given.constraint,
            unset=unset_sampling(given),
            max_draft_tokens=max_draft_tokens(self.speculative),
        )

    def _sampling(self) -> SamplingParams:
        given, names = self.sampling_params, distinct(self.token_ids_logprob)
        num_top = 0 if names else self.top_logprobs_num or 0
        return msgspec.structs.replace(
            shared_sampling(given),
            seed=given.sampling_seed,
            max_tokens=given.max_new_tokens,
            min_tokens=given.min_new_tokens or 0,
            logprobs=num_top if self.return_logprob else None,
            prompt_logprobs=(self.top_logprobs_num or 0) if self.wants_prompt_logprobs else None,
            logprob_token_ids=names if self.return_logprob else (),
        )


def _is_text(value: Any) -> bool:
    return isinstance(value, str) or (bool(value) and isinstance(value[0], str))


def _invalid(message: str, param: str) -> ApiError:
    return ApiError(ApiErrorCode.INVALID_REQUEST, message, param)
