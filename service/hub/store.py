"""Fetches what Tessera reads of a model at the hub, and nothing else, into the hub's cache.

Small files come first and are judged before a byte of weights is read. Weights are safetensors;
pickles and code of a repository are never fetched. Whatever goes wrong is a ModelLoadError that
says what to do. Knows no engine.
"""

import glob
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import DryRunError

from service.hub.failures import describing_failures
from service.hub.ids import HubModel
from service.hub.progress import OnBytes, make_counter, no_progress
from workers.errors import ModelLoadError
from workers.loading.pooling_config import POOLING_FILE
from workers.loading.sentence_modules import MODULES_FILE, PROMPTS_FILE, SENTENCE_FILE
from workers.loading.weight_files import INDEX_FILE, SINGLE_FILE, indexed_file_names

SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
    MODULES_FILE,
    PROMPTS_FILE,
    SENTENCE_FILE,
    POOLING_FILE,
    INDEX_FILE,
)
_REQUIRED = {
    "config.json": "it is not a model in the layout of transformers",
    "tokenizer.json": "Tessera needs the fast form of its tokenizer, which AutoTokenizer."
    "from_pretrained(id).save_pretrained(folder) writes where transformers can convert it",
}
CheckFolder = Callable[[Path], None]
OnFound = Callable[[str], None]
_log = logging.getLogger(__name__)


def accept(folder: Path) -> None:
    """The CheckFolder of those who need no judgement."""


@dataclass(frozen=True, slots=True)
class HubStore:
    """endpoint, cache_dir, token: None takes what the hub library finds in its environment.

    All methods block; several processes may fetch the same model into one cache at the same time.
    """

    endpoint: str | None = None
    cache_dir: Path | None = None
    token: str | None = None

    def fetch_text(self, model: HubModel) -> Path:
        """A folder with config, tokenizer and chat template. Raises ModelLoadError."""
        return self._fetch_small(model, None)

    def fetch(
        self,
        model: HubModel,
        check: CheckFolder = accept,
        on_bytes: OnBytes = no_progress,
    ) -> Path:
        """A folder in the cache with everything an engine reads. Raises ModelLoadError.

        check: looks at the folder before any weights are fetched into it; what it raises ends the
        fetch. on_bytes(done, total): of the weights, from any thread.
        """
        folder = self._fetch_small(model, None)
        check(folder)
        # A branch may move meanwhile: weights come from the commit that was judged.
        self._fetch_weights(HubModel(model.id, folder.name), folder, None, on_bytes)
        return folder

    def fetch_to(
        self,
        model: HubModel,
        folder: Path,
        begin: OnFound,
        check: CheckFolder = accept,
        on_bytes: OnBytes = no_progress,
    ) -> str:
        """As fetch(), into a folder of real files outside the cache. Returns the commit.

        What an interrupted call left there is gone on with. Needs the hub, unlike fetch(). begin:
        is told the commit before anything is written, and may raise to prevent it.
        """
        fixed = self._at_commit(model)
        begin(str(fixed.revision))
        self._fetch_small(fixed, folder)
        check(folder)
        self._fetch_weights(fixed, folder, folder, on_bytes)
        return str(fixed.revision)

    def fetch_text_to(self, model: HubModel, folder: Path, begin: OnFound) -> str:
        """As fetch_text(), into a folder of real files. Otherwise as fetch_to()."""
        fixed = self._at_commit(model)
        begin(str(fixed.revision))
        self._fetch_small(fixed, folder)
        return str(fixed.revision)

    def _at_commit(self, model: HubModel) -> HubModel:
        api = HfApi(endpoint=self.endpoint, token=self.token)
        with describing_failures(model):
            commit = api.model_info(model.id, revision=model.revision).sha
        if commit is None:
            raise ModelLoadError(f"{model}: the hub names no commit")
        return HubModel(model.id, commit)

    def _fetch_small(self, model: HubModel, local_dir: Path | None) -> Path:
        folder = self._snapshot(model, SMALL_FILES, local_dir, no_progress)
        for name, why in _REQUIRED.items():
            if not (folder / name).is_file():
                raise ModelLoadError(f"{model} has no {name}: {why}")
        return folder

    def _fetch_weights(
        self, model: HubModel, folder: Path, local_dir: Path | None, on_bytes: OnBytes
    ) -> None:
        index = folder / INDEX_FILE
        names = sorted(indexed_file_names(index)) if index.is_file() else [SINGLE_FILE]
        self._snapshot(model, names, local_dir, on_bytes)
        missing = [name for name in names if not (folder / name).is_file()]
        if missing == [SINGLE_FILE]:
            raise ModelLoadError(
                f"{model.id} has no safetensors weights ({SINGLE_FILE} or {INDEX_FILE}); pickled "
                "ones (.bin, .pt) can run code when read and are never fetched"
            )
        if missing:
            raise ModelLoadError(f"{model.id}: {INDEX_FILE} names {missing[0]}, which is missing")

    def _snapshot(
        self, model: HubModel, names: Sequence[str], local_dir: Path | None, on_bytes: OnBytes
    ) -> Path:
        """The folder that holds those of the files that there are."""
        patterns = [glob.escape(name) for name in names]
        with describing_failures(model):
            total_bytes = self._missing_bytes(model, patterns, local_dir)
            found = snapshot_download(
                model.id,
                revision=model.revision,
                cache_dir=self.cache_dir,
                local_dir=local_dir,
                allow_patterns=patterns,
                tqdm_class=make_counter(total_bytes, on_bytes),
                token=self.token,
                endpoint=self.endpoint,
            )
        return Path(found)

    def _missing_bytes(
        self, model: HubModel, patterns: Sequence[str], local_dir: Path | None
    ) -> int:
        """What is to be transferred. 0 where the hub cannot be asked and the cache must do."""
        try:
            files = snapshot_download(
                model.id,
                revision=model.revision,
                cache_dir=self.cache_dir,
                local_dir=local_dir,
                allow_patterns=list(patterns),
                token=self.token,
                endpoint=self.endpoint,
                tqdm_class=make_counter(0, no_progress),
                dry_run=True,
            )
        except DryRunError as error:
            if not constants.is_offline_mode():
                _log.warning("%s: the hub cannot be asked, so the cache must do: %s", model, error)
            return 0
        return sum(file.file_size or 0 for file in files if file.will_download)
