"""What a watched folder of adapters holds that can be served. Knows no names that are taken, no
ingress; runs in a thread, as it reads files.
"""

import errno
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from service.adapters.control import ReadAdapter
from service.adapters.folder_look import FolderLook, SubfolderLook, look_at, look_at_subfolder
from service.adapters.unmapped import unmapped_adapter
from workers.adapters.ref import AdapterInfo, AdapterRef
from workers.errors import AdapterError

MAX_READS = 16
"""Of one reading: what was read is served before all is."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a subfolder is of no use. is_final: reading the same files again brings nothing else.
    trace: of what nobody foresaw, else ""."""

    reason: str
    is_final: bool
    trace: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class FolderContents:
    """adapters: by name. kept: names of which nothing can be said now, so that what was said before
    holds: being written or removed, of no use, not read yet. refused: why the ones of no use are,
    each once a content. is_whole: all was read that can be. is_doubted: nothing is there, and it is
    not known on which file system there was something: perhaps that one has gone."""

    adapters: Mapping[str, AdapterRef]
    kept: frozenset[str]
    refused: Mapping[str, Refusal]
    is_whole: bool
    is_doubted: bool = False


@dataclass(frozen=True, slots=True)
class _Read:
    """What came of files that looked so."""

    look: SubfolderLook
    info: AdapterInfo
    outcome: AdapterRef | Refusal


class FolderReader:
    """Two looks in a row have to agree before anything is said of a subfolder, also that it is
    gone. Files are read when they look otherwise than they did when they were read last."""

    def __init__(
        self,
        folder: Path,
        look: Callable[[Path], FolderLook] = look_at,
        read: ReadAdapter = unmapped_adapter,
    ) -> None:
        self._folder = folder
        self._look = look
        self._read_files = read
        self._last: FolderLook | None = None
        self._device: int | None = None
        self._reads: dict[str, _Read] = {}

    @property
    def device(self) -> int | None:
        """On which file system adapters were seen last; None: none were."""
        return self._device

    def forget(self) -> None:
        """Begin anew: somebody else watches."""
        self._last = self._device = None
        self._reads = {}

    def read(self, info: AdapterInfo, device: int | None = None) -> FolderContents | None:
        """info: of the model. device: on which adapters were seen by who watched before. None: the
        first look. Raises OSError where the folder cannot be read."""
        last, now = self._last, self._look(self._folder)
        self._device = _device(now, device if self._device is None else self._device)
        self._last = now
        if last is None:
            return None
        steady = {n: look for n, look in now.subfolders.items() if last.subfolders.get(n) == look}
        names = last.subfolders.keys() | now.subfolders.keys()
        self._reads = {name: one for name, one in self._reads.items() if name in names}
        return self._contents(names, steady, info)

    def _contents(
        self, names: set[str], steady: Mapping[str, SubfolderLook], info: AdapterInfo
    ) -> FolderContents:
        adapters: dict[str, AdapterRef] = {}
        refused: dict[str, Refusal] = {}
        unread = [name for name, look in steady.items() if self._read_of(name, look, info) is None]
        failed = [name for name in steady if self._has_failed(name, steady[name], info)]
        for name in (*unread[:MAX_READS], *failed):
            refusal = self._read(name, steady[name], info)
            if refusal is not None:
                refused[name] = refusal
        for name, look in steady.items():
            one = self._read_of(name, look, info)
            if one is not None and isinstance(one.outcome, AdapterRef):
                adapters[name] = one.outcome
        kept = frozenset(names - adapters.keys())
        is_doubted = not names and self._device is None
        return FolderContents(adapters, kept, refused, len(unread) <= MAX_READS, is_doubted)

    def _read_of(self, name: str, look: SubfolderLook, info: AdapterInfo) -> _Read | None:
        """What came of the files as they look now."""
        one = self._reads.get(name)
        return one if one is not None and (one.look, one.info) == (look, info) else None

    def _has_failed(self, name: str, look: SubfolderLook, info: AdapterInfo) -> bool:
        """In a way that may pass."""
        one = self._read_of(name, look, info)
        return one is not None and isinstance(one.outcome, Refusal) and not one.outcome.is_final

    def _read(self, name: str, look: SubfolderLook, info: AdapterInfo) -> Refusal | None:
        """Why it is of no use, if that is new."""
        before = self._reads.get(name)
        outcome = self._outcome(name, look, info)
        if look_at_subfolder(self._folder / name) != look:
            return None  # written to meanwhile
        self._reads[name] = now = _Read(look, info, outcome)
        if isinstance(outcome, AdapterRef) or now == before:
            return None
        return outcome

    def _outcome(self, name: str, look: SubfolderLook, info: AdapterInfo) -> AdapterRef | Refusal:
        if look.trouble:
            return Refusal(look.trouble, is_final=False)
        try:
            return self._read_files(name, Path(look.folder), info)
        except AdapterError as error:
            # A file system's trouble passes, contents do not.
            return Refusal(str(error), not isinstance(error.__cause__, OSError))
        except Exception as error:  # noqa: BLE001 - others write these files: none may end a watch
            reason = f"reading it failed: {type(error).__name__}: {error}"
            is_final = not isinstance(error, OSError | MemoryError)
            return Refusal(reason, is_final, traceback.format_exc())


def _device(now: FolderLook, before: int | None) -> int | None:
    """On which adapters were seen last. before: that before this look. A place whose file system
    has gone looks empty: raises OSError."""
    if now.subfolders:
        return now.device
    if before not in (None, now.device):
        raise OSError(errno.ENODEV, "its file system is not mounted")
    return before
