"""`tessera fetch`: a model of the hub into the hub's cache or a folder, without an engine.

A folder gets a marker once everything is in it, so that a job that runs again costs nothing and
nobody serves half a model. Knows flags and terminals; service.hub.store does the work.
"""

import secrets
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from service.command.fetch_display import make_fetch_display
from service.hub.ids import HubModel
from service.hub.progress import OnBytes
from service.hub.store import CheckFolder, HubStore, accept
from service.model_names import is_hub_id
from workers.config import EngineConfig
from workers.errors import ConfigError, ModelLoadError

MARKER = ".tessera-complete"
# Of a folder with config and tokenizer, which may have weights or some of them besides.
TEXT_MARKER = ".tessera-complete-text"
# Of a folder that a fetch has begun with: what lies there is that model's.
BEGUN_MARKER = ".tessera-begun"

Model = Annotated[str, typer.Argument(help="An id of the hub, such as Qwen/Qwen3-0.6B.")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit; default main.")]
To = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help=f"Write the files there, and {MARKER} when all of them are complete; a folder that "
        "has it already is left as it is. Default: the hub's cache.",
    ),
]
TextOnly = Annotated[
    bool,
    typer.Option(
        "--text-only", help=f"Config and tokenizer, no weights; the marker is {TEXT_MARKER}."
    ),
]
Anything = Annotated[
    bool, typer.Option("--any-architecture", help="Do not ask whether Tessera serves it.")
]


class FetchMarker(msgspec.Struct, frozen=True):
    """What a folder holds. revision: as asked for, which is what a rerun is held to."""

    model: str
    revision: str | None
    commit: str


def fetch(
    model: Model,
    revision: Revision = None,
    to: To = None,
    text_only: TextOnly = False,
    any_architecture: Anything = False,
) -> None:
    """Fetch a model of the Hugging Face hub; an interrupted fetch is gone on with."""
    console = Console(stderr=True)
    wanted = HubModel(model, revision)
    check = accept if any_architecture else _check_servable
    try:
        if not is_hub_id(model):
            raise ModelLoadError(f"{model!r} is no id of the hub")
        with make_fetch_display(console, f"fetching {wanted}") as display:
            if text_only:
                folder = _fetch_text(wanted, to)
            elif to is None:
                folder = HubStore().fetch(wanted, check, display.update)
            else:
                folder = _fetch_to(wanted, to, check, display.update)
    except (ModelLoadError, ConfigError) as error:
        console.print(f"tessera fetch: {error}", highlight=False, markup=False, soft_wrap=True)
        raise typer.Exit(1) from error
    typer.echo(str(folder))


def _check_servable(folder: Path) -> None:
    # Seconds of imports: torch and transformers.
    from workers.loading.loader import check_servable

    check_servable(EngineConfig(model=str(folder)))


def _fetch_to(wanted: HubModel, folder: Path, check: CheckFolder, on_bytes: OnBytes) -> Path:
    """Raises ModelLoadError; a folder of another model is not touched."""
    if _is_held(wanted, folder, MARKER):
        return folder
    store = HubStore()
    commit = store.fetch_to(
        wanted, folder, lambda found: _begin(wanted, folder, found), check, on_bytes
    )
    _write_marker(folder / MARKER, FetchMarker(wanted.id, wanted.revision, commit))
    return folder


def _fetch_text(wanted: HubModel, folder: Path | None) -> Path:
    """As _fetch_to(), without weights; the hub's cache where folder is None."""
    if folder is None:
        return HubStore().fetch_text(wanted)
    if _is_held(wanted, folder, MARKER) or _is_held(wanted, folder, TEXT_MARKER):
        return folder
    commit = HubStore().fetch_text_to(wanted, folder, lambda found: _begin(wanted, folder, found))
    _write_marker(folder / TEXT_MARKER, FetchMarker(wanted.id, wanted.revision, commit))
    return folder


def _begin(wanted: HubModel, folder: Path, commit: str) -> None:
    """Before anything is written: a folder with files of two models would be taken for whole.

    Raises ModelLoadError if another one's fetch was there first.
    """
    for name in (TEXT_MARKER, BEGUN_MARKER):
        _is_held(wanted, folder, name)
    folder.mkdir(parents=True, exist_ok=True)
    _write_marker(folder / BEGUN_MARKER, FetchMarker(wanted.id, wanted.revision, commit))


def _is_held(wanted: HubModel, folder: Path, name: str) -> bool:
    """Raises ModelLoadError if the folder has that marker of another model."""
    marker = read_marker(folder, name)
    if marker is None:
        return False
    held = HubModel(marker.model, marker.revision)
    if held != wanted:
        raise ModelLoadError(f"{folder} holds {held}; take another folder for {wanted}")
    return True


def read_marker(folder: Path, name: str = MARKER) -> FetchMarker | None:
    """None where the folder does not have it. Raises ModelLoadError for a broken marker."""
    path = folder / name
    if not path.is_file():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=FetchMarker)
    except (OSError, msgspec.MsgspecError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from error


def _write_marker(path: Path, marker: FetchMarker) -> None:
    # Pods that share the folder may have the same process ids.
    unfinished = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    unfinished.write_bytes(msgspec.json.encode(marker))
    unfinished.replace(path)
