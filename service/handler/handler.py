"""Handler: check, tokenise, submit. The one way into the engine for every protocol.

Knows no HTTP, no gRPC and no replica. Everything it needs is injected.
"""

import asyncio
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import msgspec

from service.api.errors import ApiError
from service.backend import GenerationBackend, TokenStream
from service.handler.checks import (
    FittedPrompt,
    check_prompt,
    check_request,
    check_token_ids,
    fit_prompts,
)
from service.handler.choice import ChoiceAssembler, ChoiceOptions
from service.handler.generation import ChoiceRun, Generation, GenerationInfo
from service.handler.metrics import RequestMetrics
from service.handler.requests import GenerationRequest, Prompt, TokenPrompt
from service.limits import Limits
from service.request_log.record import current_record
from service.security.callers import current_caller
from service.security.quota import Lease
from service.session import make_session_key, session_name, set_session_key
from service.tokenizer.jobs import EncodeChat, EncodeText
from service.tokenizer.pieces import TokenPieces
from service.tokenizer.pool import Tokenizer
from service.tokenizer.stop_strings import StopStrings
from workers.protocol import GenerateRequest, ModelInfo
from workers.sampling.params import MAX_SEED, SamplingParams


class Handler:
    """One per model and ingress process, used from its event loop only."""

    def __init__(
        self,
        backend: GenerationBackend,
        tokenizer: Tokenizer,
        pieces: TokenPieces,
        limits: Limits,
        metrics: RequestMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = limits
        self._backend = backend
        self._tokenizer = tokenizer
        self._pieces = pieces
        self._metrics = metrics
        self._clock = clock

    @property
    def model_info(self) -> ModelInfo:
        """Raises ApiError before any replica was seen."""
        return self._backend.info

    def token_bytes(self, token_ids: list[int]) -> list[bytes]:
        """What each token stands for by itself."""
        return [self._pieces.token_bytes(token_id) for token_id in token_ids]

    async def start(self, request: GenerationRequest) -> Generation:
        """Admit a request and send its choices to replicas; use the result as a context.

        Raises ApiError if the request is refused; nothing is left running then.
        """
        arrival_s = self._clock()
        request = replace(request, session_id=session_name() or request.session_id)
        try:
            check_request(request, self.limits, self.model_info)
            self._backend.check_admission()
            generation = await self._start(request, current_caller().quota.admit(), arrival_s)
        except ApiError as error:
            self._metrics.on_rejected(error.code.value)
            raise
        self._metrics.on_accepted(generation.usage.num_prompt_tokens, len(generation.runs))
        return generation

    async def tokenise(self, prompt: Prompt) -> list[int]:
        """Token ids of one prompt, with the same ceilings as a generation. Raises ApiError."""
        check_prompt(prompt, self.limits, self.model_info)
        with _counted_call():
            return (await self._tokenise((prompt,)))[0]

    async def detokenise(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        """Raises ApiError."""
        check_token_ids(token_ids, self.limits, self.model_info, "tokens")
        with _counted_call():
            return await self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    async def _start(
        self, request: GenerationRequest, lease: Lease, arrival_s: float
    ) -> Generation:
        """The generation ends the lease, or this does when it cannot start."""
        try:
            prompts = await self._tokenise(request.prompts)
            fitted = fit_prompts(request, prompts, self.limits, self.model_info)
            lease.charge_prompt(sum(len(prompt.token_ids) for prompt in fitted))
            echoes = await self._echoed_texts(request, fitted)
            return await self._submit(request, fitted, echoes, lease, arrival_s)
        except BaseException:
            lease.cancel()
            raise

    async def _tokenise(self, prompts: tuple[Prompt, ...]) -> list[list[int]]:
        if len(prompts) == 1:
            return [await self._encode(prompts[0])]
        return await asyncio.gather(*map(self._encode, prompts))

    async def _encode(self, prompt: Prompt) -> list[int]:
        match prompt:
            case EncodeText():
                return await self._tokenizer.encode_text(prompt)
            case EncodeChat():
                return await self._tokenizer.encode_chat(prompt)
            case TokenPrompt():
                return prompt.token_ids

    async def _echoed_texts(
        self, request: GenerationRequest, fitted: list[FittedPrompt]
    ) -> list[str]:
        if not request.text.echo:
            return [""] * len(fitted)
        return await asyncio.gather(
            *(
                self._tokenizer.decode(
                    prompt.token_ids, skip_special_tokens=request.text.skip_special_tokens
                )
                for prompt in fitted
            )
        )

    async def _submit(
        self,
        request: GenerationRequest,
        fitted: list[FittedPrompt],
        echoes: list[str],
        lease: Lease,
        arrival_s: float,
    ) -> Generation:
        unique_id = uuid.uuid4().hex
        options = self._choice_options(request)
        specs = [
            self._engine_request(request, prompt, f"{unique_id}-{i}-{j}", j)
            for i, prompt in enumerate(fitted)
            for j in range(request.n)
        ]
        set_session_key(_session_key(request))
        submitted_s = self._clock()
        streams = await self._submit_all(specs)
        runs = [
            ChoiceRun(
                stream,
                ChoiceAssembler(index, options, echoes[index // request.n]),
                spec.prompt_token_ids,
                submitted_s,
            )
            for index, (stream, spec) in enumerate(zip(streams, specs, strict=True))
        ]
        info = GenerationInfo(
            request_id=request.request_id or unique_id,
            model=self.model_info.name,
            created_s=int(time.time()),
            prompts=[prompt.token_ids for prompt in fitted],
        )
        generation = Generation(
            info, runs, self._pieces, self._metrics, lease, arrival_s, self._clock, current_record()
        )
        generation.describe()
        return generation

    async def _submit_all(self, specs: list[GenerateRequest]) -> list[TokenStream]:
        """All streams or, if one request is refused, none."""
        if len(specs) == 1:
            return [await self._backend.submit(specs[0])]
        tasks = [asyncio.create_task(self._backend.submit(spec)) for spec in specs]
        try:
            return list(await asyncio.gather(*tasks))
        except BaseException:
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            streams = [result for result in results if not isinstance(result, BaseException)]
            await asyncio.gather(*(stream.aclose() for stream in streams))
            raise

    def _choice_options(self, request: GenerationRequest) -> ChoiceOptions:
        sampling = request.sampling
        eos_ids = frozenset(self.model_info.eos_token_ids)
        return ChoiceOptions(
            pieces=self._pieces,
            text=request.text,
            stop_strings=StopStrings(request.text.stop) if request.text.stop else None,
            min_tokens=sampling.min_tokens,
            visible_stop_ids=frozenset(sampling.stop_token_ids)
            - (frozenset() if sampling.ignore_eos else eos_ids),
            is_scoring_only=request.is_scoring_only,
        )

    def _engine_request(
        self, request: GenerationRequest, prompt: FittedPrompt, request_id: str, choice: int
    ) -> GenerateRequest:
        return GenerateRequest(
            request_id=request_id,
            prompt_token_ids=prompt.token_ids,
            sampling=_sampling_of_choice(request.sampling, prompt.max_tokens, choice),
            priority=request.priority,
            cache_salt=current_caller().salted(request.cache_salt),
        )


def _session_key(request: GenerationRequest) -> bytes:
    caller = current_caller()
    return make_session_key(caller.name, caller.salted(request.cache_salt), request.session_id)


@contextmanager
def _counted_call() -> Iterator[None]:
    """A call that generates nothing counts as a request of its caller, but for no tokens."""
    lease = current_caller().quota.admit()
    try:
        yield
    finally:
        lease.end(0)


def _sampling_of_choice(sampling: SamplingParams, max_tokens: int, choice: int) -> SamplingParams:
    """Choices of one prompt differ in their seed only; seeds wrap around at the top."""
    seed = sampling.seed
    if seed is not None and choice:
        seed = seed + choice if seed <= MAX_SEED - choice else seed - MAX_SEED + choice - 1
    return msgspec.structs.replace(sampling, max_tokens=max_tokens, seed=seed)
