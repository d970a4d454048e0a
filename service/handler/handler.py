"""Handler: check, tokenise, submit. The one way into the engine for every protocol.

Knows no HTTP, no gRPC and no replica. Everything it needs is injected.
"""

import copy
import time
import uuid
from collections.abc import Callable, Sequence

from service.backend import GenerationBackend, TokenStream
from service.handler.beam_requests import search_plans, with_beam_length
from service.handler.beam_streams import search_streams
from service.handler.best import with_likelihoods
from service.handler.chats import Assembler, Chats
from service.handler.checks import (
    check_num_tokens,
    check_prompt,
    check_request,
    check_rights,
    fit_prompts,
)
from service.handler.choice import ChoiceAssembler, ChoiceOptions
from service.handler.constraints import check_constraint
from service.handler.defaults import NO_DEFAULTS, SamplingDefaults
from service.handler.delta_buffer import DeltaBuffer
from service.handler.echo import PromptEcho
from service.handler.embedding import VectorAssembler, pooling_of, with_prompt
from service.handler.encoding import (
    EnginePrompt,
    PromptEncoder,
    check_range,
    for_engine,
    with_sources,
)
from service.handler.generation import ChoiceRun, Generation, GenerationInfo
from service.handler.images import ImageRoom, check_images
from service.handler.metrics import RequestMetrics
from service.handler.requests import GenerationRequest, Prompt
from service.handler.sources import without_excluded
from service.handler.submission import engine_requests, submit_all
from service.handler.thinking import BudgetedBackend
from service.handler.token_rules import with_token_rules
from service.limits import Limits
from service.request_context import RequestContext
from service.security.quota import Lease
from service.tokenizer.jobs import AudioFeatures
from service.tokenizer.pieces import TokenPieces
from service.tokenizer.pool import Tokenizer
from service.tokenizer.stop_strings import StopStrings
from workers.engine.encoder_input import TextEncoder
from workers.engine.protocol import GenerateRequest, ModelInfo


class Handler:
    """One per model and ingress process, used from its event loop only."""

    def __init__(
        self,
        backend: GenerationBackend,
        tokenizer: Tokenizer,
        pieces: TokenPieces,
        limits: Limits,
        metrics: RequestMetrics,
        chats: Chats,
        defaults: SamplingDefaults = NO_DEFAULTS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = limits
        self.metrics = metrics
        self._backend = backend
        self._encoder = PromptEncoder(tokenizer)
        self._pieces = pieces
        self._chats = chats
        self._defaults = defaults
        self._image_room = ImageRoom(limits)
        self._clock = clock

    def over(self, backend: GenerationBackend, metrics: RequestMetrics) -> "Handler":
        """This one for requests that go to another backend of the same model, and whom these
        metrics count. All that requests use up is in common."""
        other = copy.copy(self)
        other.metrics, other._backend = metrics, backend
        return other

    @property
    def model_info(self) -> ModelInfo:
        """Raises ApiError before any replica was seen."""
        return self._backend.info

    def token_bytes(self, token_ids: Sequence[int]) -> list[bytes]:
        """What each token stands for by itself."""
        return [self._pieces.token_bytes(token_id) for token_id in token_ids]

    def check_admission(self) -> None:
        """Raise ApiError if no request at all would be taken now."""
        self._backend.check_admission()

    async def start(
        self, request: GenerationRequest, context: RequestContext, lease: Lease
    ) -> Generation:
        """Check a request and send its choices to replicas; use the result as a context.

        lease: of the caller's quota; the generation ends it. Raises ApiError if the request is
        refused; nothing is left running then.
        """
        arrival_s = self._clock()
        context = context.in_session(request.session_id)
        request = with_beam_length(self._defaults.applied(request), self.limits)
        request = with_likelihoods(request)
        try:
            # What a constraint is made of is read only where it is no larger than it may be.
            check_constraint(request, self.limits, self.model_info)
            check_request(self._chats.check(request), self.limits, self.model_info)
            check_rights(request, context, self.limits)
            self._backend.check_admission()
            max_at_once = self._take_places(request, lease)
            lease = self._image_room.lend(request, lease)
            generation = await self._start(request, context, lease, arrival_s, max_at_once)
        except BaseException:
            lease.cancel()
            raise
        context.record.is_accepted = True
        self.metrics.on_accepted(generation.usage.num_prompt_tokens, len(generation.runs))
        return generation

    async def tokenise(self, prompt: Prompt, context: RequestContext) -> Sequence[int]:
        """Token ids of one prompt, with the same ceilings as a generation. Raises ApiError."""
        check_prompt(prompt, self.limits)
        check_images(prompt, self.limits, self.model_info)
        prompt = await self._encoder.see_prompt(prompt, context, None)
        (token_ids,) = await self._encoder.encode((prompt,), context, self.model_info, None)
        return token_ids

    async def detokenise(
        self,
        token_ids: Sequence[int],
        context: RequestContext,
        *,
        skip_special_tokens: bool = False,
    ) -> str:
        """Raises ApiError."""
        check_num_tokens(token_ids, self.limits, "tokens")
        await check_range(token_ids, self.model_info, "tokens")
        (text,) = await self._encoder.decode(
            [token_ids], context, skip_special_tokens=skip_special_tokens
        )
        return text

    async def read_audio(self, audio: bytes, context: RequestContext) -> AudioFeatures:
        """What the model's encoder hears of a file. Raises ApiError."""
        return await self._encoder.read_audio(audio, context)

    def _take_places(self, request: GenerationRequest, lease: Lease) -> int:
        """How many sequences may run at once. Raises ApiError."""
        num_sequences = len(request.prompts) * request.n
        if request.embedding is not None:
            return lease.take_up_to(min(num_sequences, self.limits.max_inputs_at_once))
        lease.take_sequences(num_sequences)
        return num_sequences

    async def _start(
        self,
        request: GenerationRequest,
        context: RequestContext,
        lease: Lease,
        arrival_s: float,
        max_at_once: int,
    ) -> Generation:
        info, max_tokens = self.model_info, self._max_prompt_tokens(request)
        request = with_prompt(request, info)
        request = await self._encoder.see(request, context, max_tokens)
        request = await self._encoder.read(request, context, info)
        self._image_room.settle(request, lease)
        prompts = await self._encoder.encode(request.prompts, context, info, max_tokens)
        request = self._chats.constrained(request, prompts[0])
        request = await with_token_rules(request, self._encoder.encode_plain, context, info)
        grammar = await self._encoder.make_grammar(request.constraint, context)
        engine_prompts = await for_engine(fit_prompts(request, prompts, self.limits, info))
        fitted = with_sources(engine_prompts, request.prompts, info)
        lease.charge_prompt(sum(prompt.num_input_tokens for prompt in fitted))
        echoes = await self._echoed_texts(request, context, fitted)
        return await self._submit(
            request, context, fitted, grammar, echoes, lease, arrival_s, max_at_once
        )

    async def _echoed_texts(
        self, request: GenerationRequest, context: RequestContext, fitted: list[EnginePrompt]
    ) -> list[str]:
        if not request.text.echo:
            return [""] * len(fitted)
        return await self._encoder.decode(
            [prompt.token_ids for prompt in fitted],
            context,
            skip_special_tokens=request.text.skip_special_tokens,
        )

    def _max_prompt_tokens(self, request: GenerationRequest) -> int | None:
        """What a prompt may have at most if any of its tokens is to be answered."""
        if request.truncate_prompt_tokens is not None:
            return None
        encoder = self.model_info.encoder
        if isinstance(encoder, TextEncoder):
            return encoder.max_tokens
        return self.model_info.max_request_len - (request.embedding is None)

    async def _submit(
        self,
        request: GenerationRequest,
        context: RequestContext,
        fitted: list[EnginePrompt],
        grammar: str,
        echoes: list[str],
        lease: Lease,
        arrival_s: float,
        max_at_once: int,
    ) -> Generation:
        unique_id = uuid.uuid4().hex
        sent = without_excluded(request, self.model_info)
        pooling = pooling_of(request, self.model_info)
        caller = context.caller
        specs = await engine_requests(sent, caller, fitted, unique_id, grammar, pooling)
        # What may fail comes before the streams: nobody else would end them.
        client_ids = [prompt.client_token_ids for prompt in fitted]
        make_assembler = self._assemblers(request, client_ids[0], echoes)
        assemblers = [make_assembler(index) for index in range(len(specs))]
        submitted_s = self._clock()
        streams = await self._streams(request, context, specs, max_at_once)
        info = GenerationInfo(
            request_id=request.request_id or unique_id,
            model=self.model_info.name,
            created_s=int(time.time()),
            prompts=client_ids,
        )
        runs = [
            ChoiceRun(
                stream,
                assemblers[index],
                PromptEcho(
                    index,
                    echoes[index // request.n],
                    client_ids[index // request.n],
                    is_echoed=request.text.echo and request.sampling.logprobs is not None,
                ),
                client_ids[index // request.n],
                submitted_s,
                DeltaBuffer(request.stream_interval) if request.stream_interval > 1 else None,
            )
            for index, stream in enumerate(streams)
        ]
        generation = Generation(
            request,
            info,
            runs,
            self._pieces,
            self.metrics,
            lease,
            arrival_s,
            self._clock,
            context.record,
            max_at_once,
        )
        generation.describe()
        return generation

    async def _streams(
        self,
        request: GenerationRequest,
        context: RequestContext,
        specs: list[GenerateRequest],
        max_at_once: int,
    ) -> list[TokenStream]:
        """Of all choices. Raises ApiError."""
        if request.beams is None:
            backend = await self._backend_of(request, context, specs[0].prompt_token_ids)
            return await submit_all(backend, specs, context, max_at_once)
        firsts = specs[:: request.n]
        plans = search_plans(firsts, request, request.beams, self.limits, self.model_info)
        return search_streams(plans, self._backend, context)

    async def _backend_of(
        self, request: GenerationRequest, context: RequestContext, prompt: list[int]
    ) -> GenerationBackend:
        """One that keeps to the request's thinking budget, where it has any."""
        end = self._chats.thinking_end(request)
        if not end:
            return self._backend
        encode = self._encoder.encode_plain
        (end_ids,) = await encode([end], context, parse_special_tokens=True)
        return BudgetedBackend(self._chats.thinking_plan(request, prompt, end_ids), self._backend)

    def _assemblers(
        self, request: GenerationRequest, first_prompt: list[int], echoes: list[str]
    ) -> Callable[[int], Assembler | VectorAssembler]:
        """What makes the assembler of each choice."""
        if request.embedding is not None:
            return VectorAssembler
        options = self._choice_options(request)

        def make(index: int) -> Assembler:
            plain = ChoiceAssembler(index, options, len(echoes[index // request.n]))
            return self._chats.assembler(request, plain, first_prompt)

        return make

    def _choice_options(self, request: GenerationRequest) -> ChoiceOptions:
        sampling = request.sampling
        eos_ids = frozenset(self.model_info.eos_token_ids)
        return ChoiceOptions(
            pieces=self._pieces if request.chat is None else self._chats.format.pieces,
            text=request.text,
            stop_strings=StopStrings(request.text.stop) if request.text.stop else None,
            min_tokens=sampling.min_tokens,
            visible_stop_ids=frozenset(sampling.stop_token_ids)
            - (frozenset() if sampling.ignore_eos else eos_ids),
            is_scoring_only=request.is_scoring_only,
            repetition=request.repetition,
        )
