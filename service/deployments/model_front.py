"""ModelFront: one model as an ingress serves it, from its tokenizer to the links to its replicas.

Whatever a model can use up is its own: tokenizer processes, routes, a share of the admission. So
trouble of one model stays with it. Knows no protocol and no Ray.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from prometheus_client import CollectorRegistry

from service.adapters.control import AdapterControl
from service.adapters.files import configured_adapters, watched_folder
from service.adapters.folder_reader import FolderReader
from service.adapters.folder_watch import FolderBoardClient, FolderWatch
from service.adapters.served import ServedAdapters
from service.adapters.shelf import AdapterShelf
from service.autoscaling.demand import report_demand
from service.autoscaling.load import DemandReport, ModelAvailability, load_key
from service.channel.address import ReplicaAddress
from service.chat.format import make_chat_format
from service.config import ModelConfig, ServeConfig
from service.generation_config import read_sampling_defaults
from service.handler.chats import Chats
from service.handler.defaults import NO_DEFAULTS, SamplingDefaults
from service.handler.directory import ServedModel
from service.handler.handler import Handler
from service.hub.resolve import text_folder
from service.images.files import ImageCeilings
from service.model_names import is_hub_id
from service.observability.adapter_metrics import AdapterMetrics, FolderMetrics
from service.observability.exporter import take_snapshot
from service.observability.metrics import IngressGauges, IngressMetrics, IngressStateCollector
from service.remote.fetcher import make_fetcher
from service.routing.admission import AdmissionControl
from service.routing.router import Router
from service.routing.sleep import SleepControl
from service.tokenizer.encoder import load_tokenizer
from service.tokenizer.fetching import FetchingTokenizer
from service.tokenizer.folder import read_tokenizer_files
from service.tokenizer.grammar_compiler import GrammarCompilerConfig
from service.tokenizer.pool import TokenizerPool, TokenizerPoolConfig
from workers.adapters.ref import AdapterInfo


class ModelFront:
    """start(), then update_replicas() whenever the registry knows more, aclose() at the end. shelf:
    the model's adapters, those of the configuration once it has started. sleep: of its replicas."""

    def __init__(
        self,
        ingress_id: str,
        node_id: str,
        model: ModelConfig,
        config: ServeConfig,
        admission: AdmissionControl,
    ) -> None:
        self._ingress_id = ingress_id
        self._model = model
        self.name = model.name
        self._load_key = load_key(model.deployment, model.engine.model)
        self._limits = config.limits
        self._admission = admission
        self._collectors = CollectorRegistry()
        self._metrics = IngressMetrics(self._collectors)
        self._adapter_metrics = AdapterMetrics(self._collectors)
        self._collectors.register(IngressStateCollector(self._gauges))
        self._router = Router(
            ingress_id, node_id, config.router, config.channel, admission, self._metrics
        )
        self._num_tokenizer_processes = config.num_tokenizer_processes
        self._tokenizer: TokenizerPool | None = None
        self._fetcher = make_fetcher(config.media)
        self._folder: Path | None = None
        self.shelf = AdapterShelf(model.name, {})
        self.sleep = SleepControl(model.name, lambda: self._router.links)

    async def start(self) -> ServedModel:
        """Raises ConfigError or ModelLoadError if the tokenizer cannot be served."""
        engine = self._model.engine
        folder = await asyncio.to_thread(text_folder, engine.model, engine.revision)
        self._tokenizer = TokenizerPool(self._tokenizer_config(folder))
        await self._tokenizer.start()
        files = read_tokenizer_files(folder)
        tokenizer, pieces = load_tokenizer(files)
        chats = Chats(make_chat_format(files.chat_template, tokenizer, pieces, self._model.chat))
        handler = Handler(
            self._router,
            FetchingTokenizer(self._tokenizer, self._fetcher, self._limits),
            pieces,
            self._limits,
            self._metrics,
            chats,
            self._sampling_defaults(folder),
        )
        name = self._model.name
        configured = await asyncio.to_thread(configured_adapters, engine.lora, engine.max_lora_rank)
        self._folder = await asyncio.to_thread(watched_folder, engine.lora_folder)
        self.shelf = AdapterShelf(name, configured, has_folder=self._folder is not None)
        adapters = ServedAdapters(
            self.shelf, handler, self._router, lambda: self.is_ready, self._adapter_metrics
        )
        # A folder is nobody's business.
        root = engine.model if is_hub_id(engine.model) else name
        return ServedModel(name, handler, lambda: self.is_ready, root, adapters=adapters)

    def adapter_info(self) -> AdapterInfo | None:
        """What adapters the model takes, None for none. Raises ApiError before any replica was
        seen."""
        return self._router.info.adapters

    @property
    def is_ready(self) -> bool:
        """Whether a request for this model would be taken now."""
        return self._router.is_ready

    @property
    def is_linked(self) -> bool:
        """Whether every replica that the registry has named is connected."""
        return self._router.is_linked

    def end_requests(self) -> int:
        """Fail every request under way with a typed error; returns how many there were."""
        return self._router.end_requests()

    def check_health(self) -> None:
        """Raise if a part has failed for a reason of our own; a lost replica is none."""
        self._router.check_health()

    async def update_replicas(self, addresses: Sequence[ReplicaAddress]) -> None:
        """addresses: of all models' replicas."""
        await self._router.update_replicas([a for a in addresses if a.model == self._model.name])

    def update_availability(self, told: Sequence[ModelAvailability]) -> None:
        """told: of all models that are scaled by a policy."""
        mine = (availability for availability in told if availability.key == self._load_key)
        self._router.update_availability(next(mine, None))

    async def report_demand(self, send: Callable[[DemandReport], Awaitable[None]]) -> None:
        """Tell, for ever, how many requests wait for the model to be scaled up from zero."""
        await report_demand(self._load_key, self._ingress_id, self._router, send)

    async def watch_folder(self, control: AdapterControl, board: FolderBoardClient) -> None:
        """Serve, for ever, what is in the model's folder of adapters; ends where it has none."""
        if self._folder is None:
            return
        reader, metrics = FolderReader(self._folder), FolderMetrics(self._collectors)
        interval_s = self._model.engine.lora_folder_interval_s
        await FolderWatch(self.name, reader, control, board, metrics, interval_s).run()

    def snapshot(self) -> bytes:
        """What the exporter is told: every series carries the model's name."""
        return take_snapshot(self._collectors, "ingress", self._ingress_id, model=self._model.name)

    async def aclose(self) -> None:
        await self._router.aclose()
        if self._tokenizer is not None:
            await self._tokenizer.aclose()
        await self._fetcher.aclose()

    def _sampling_defaults(self, folder: Path) -> SamplingDefaults:
        if self._model.engine.generation_config == "none":
            return NO_DEFAULTS
        return read_sampling_defaults(folder)

    def _tokenizer_config(self, folder: Path) -> TokenizerPoolConfig:
        return TokenizerPoolConfig(
            folder=folder,
            num_workers=self._num_tokenizer_processes,
            timeout_s=self._limits.tokenizer_timeout_s,
            max_pending_jobs=self._limits.max_pending_tokenizer_jobs,
            max_rendered_bytes=self._limits.max_rendered_bytes,
            images=ImageCeilings(
                max_pixels=self._limits.max_image_pixels,
                max_total_pixels=self._limits.max_total_image_pixels,
                max_shown_pixels=self._limits.max_shown_pixels,
                max_total_shown_pixels=self._limits.max_total_shown_pixels,
            ),
            grammars=GrammarCompilerConfig(
                max_cpu_s=self._limits.max_grammar_cpu_s,
                max_pending_jobs=self._limits.max_pending_tokenizer_jobs,
            ),
        )

    def _gauges(self) -> IngressGauges:
        return IngressGauges(
            self._admission.num_live_requests,
            self._admission.queued_tokens,
            self._router.num_connected_replicas,
            self._router.num_waiting_requests,
        )


class Readiness:
    """Whether an ingress of several models should get requests.

    It starts when every model can be served and lasts while any can: an ingress that left its load
    balancer because one model has lost its replicas would take the others with it.
    """

    def __init__(self, models: Sequence[ModelFront]) -> None:
        self._models = models
        self._was_complete = False

    def __call__(self) -> bool:
        ready = [model.is_ready for model in self._models]
        self._was_complete = self._was_complete or all(ready)
        return self._was_complete and any(ready)
