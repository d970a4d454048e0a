"""`tessera generate`: offline generation by an engine in this process, text to standard output.

Knows flags and terminals; service.command.offline does the work.
"""

import sys
from contextlib import closing
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from attention.capability import AttentionBackendError
from service.command.offline import OfflineGenerator, OfflineResult, OfflineText
from service.config import EngineSettings
from service.deployments.engine_options import parse_engine_options
from service.errors import ApiError
from service.handler.requests import TextOptions
from service.hub.resolve import resolve_engine
from service.tokenizer.encoder import EncodeRefusedError
from workers.errors import ConfigError, ModelLoadError, RequestRejectedError
from workers.loading.model_folder import resolve_model_folder
from workers.parallel.local_engine import build_local_engine
from workers.sampling.params import SamplingParams

_SAMPLING = "Sampling"

Model = Annotated[
    str,
    typer.Argument(help='"builtin", "builtin-draft", a model folder or an id of the hub.'),
]
Revision = Annotated[
    str | None, typer.Option(help="Branch, tag or commit of a model of the hub; default main.")
]
Prompt = Annotated[str, typer.Option(help='The prompt; "-" reads standard input.')]
Chat = Annotated[bool, typer.Option("--chat", help="Put the prompt through the chat template.")]
System = Annotated[str | None, typer.Option(help="System message, with --chat.")]
EngineOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--engine",
        metavar="KEY=VALUE",
        help="A setting of the engine, such as page_size=16. Repeatable.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
MaxTokens = Annotated[int, typer.Option(min=1, rich_help_panel=_SAMPLING)]
MinTokens = Annotated[int, typer.Option(min=0, rich_help_panel=_SAMPLING)]
Temperature = Annotated[float, typer.Option(help="0 is greedy.", rich_help_panel=_SAMPLING)]
TopK = Annotated[int, typer.Option(help="0 is off.", rich_help_panel=_SAMPLING)]
TopP = Annotated[float, typer.Option(rich_help_panel=_SAMPLING)]
MinP = Annotated[float, typer.Option(rich_help_panel=_SAMPLING)]
RepetitionPenalty = Annotated[float, typer.Option(rich_help_panel=_SAMPLING)]
PresencePenalty = Annotated[float, typer.Option(rich_help_panel=_SAMPLING)]
FrequencyPenalty = Annotated[float, typer.Option(rich_help_panel=_SAMPLING)]
Seed = Annotated[int | None, typer.Option(rich_help_panel=_SAMPLING)]
Stop = Annotated[
    list[str] | None, typer.Option(help="Stop string. Repeatable.", rich_help_panel=_SAMPLING)
]
StopTokenId = Annotated[
    list[int] | None, typer.Option(help="Stop token id. Repeatable.", rich_help_panel=_SAMPLING)
]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", rich_help_panel=_SAMPLING)]


def generate(  # noqa: PLR0913  one parameter a flag
    prompt: Prompt,
    model: Model = "builtin",
    revision: Revision = None,
    chat: Chat = False,
    system: System = None,
    max_tokens: MaxTokens = 128,
    min_tokens: MinTokens = 0,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    presence_penalty: PresencePenalty = 0.0,
    frequency_penalty: FrequencyPenalty = 0.0,
    seed: Seed = None,
    stop: Stop = None,
    stop_token_id: StopTokenId = None,
    ignore_eos: IgnoreEos = False,
    engine: EngineOptions = None,
    json: Json = False,
) -> None:
    """Generate text with an engine in this process: no server, no Ray."""
    sampling = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        seed=seed,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop_token_ids=tuple(stop_token_id or ()),
        ignore_eos=ignore_eos,
    )
    if system is not None and not chat:
        raise typer.BadParameter("--system is for --chat")
    if stop and not all(stop):
        raise typer.BadParameter("--stop must not be empty")
    text = sys.stdin.read() if prompt == "-" else prompt
    try:
        settings = parse_engine_options(model, _engine_options(engine, revision))
        result = _generate(settings, text, chat, system, sampling, tuple(stop or ()), not json)
    except (ConfigError, AttentionBackendError) as error:
        raise typer.BadParameter(str(error)) from error
    except (ModelLoadError, EncodeRefusedError, RequestRejectedError, ApiError) as error:
        typer.echo(f"tessera generate: {error}", err=True)
        raise typer.Exit(1) from error
    typer.echo(msgspec.json.encode(result) if json else "")


def _engine_options(options: list[str] | None, revision: str | None) -> list[str]:
    return [*(options or []), *([] if revision is None else [f"revision={revision}"])]


def _generate(
    settings: EngineSettings,
    prompt: str,
    is_chat: bool,
    system: str | None,
    sampling: SamplingParams,
    stop: tuple[str, ...],
    is_streaming: bool,
) -> OfflineResult:
    with Console(stderr=True).status("loading the model") as status:

        def show(done: int, total: int) -> None:
            status.update(f"loading the model: {done / max(total, 1):.0%}")

        def show_fetched(done: int, total: int) -> None:
            status.update(f"fetching the model: {done / total:.0%} of {total / 1e9:.2f} GB")

        config = resolve_engine(settings.to_engine_config(), settings.revision, show_fetched)
        text = OfflineText.load(resolve_model_folder(config.model))
        prompt_token_ids = text.encode(prompt, is_chat=is_chat, system=system)
        engine = build_local_engine(config, show)
    with closing(engine):
        return OfflineGenerator(engine, text.pieces).generate(
            prompt_token_ids,
            sampling,
            TextOptions(stop=stop),
            _write if is_streaming else _discard,
        )


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _discard(text: str) -> None:
    """Text that is printed later, as JSON."""
