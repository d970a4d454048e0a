"""EngineConfig: everything an engine needs to know, frozen and validated once."""

from dataclasses import dataclass
from typing import Literal

from workers.errors import ConfigError
from workers.speculation.config import (
    DraftPolicyName,
    DraftQuantization,
    SpeculativeConfig,
    check_draft_limits,
    check_quantization,
    check_tree,
)

MAX_LORA_RANK = 256

DType = Literal["auto", "float32", "bfloat16", "float16"]
KVCacheDType = Literal["auto", "fp8_e4m3"]
LoadFormat = Literal["safetensors", "dummy"]
Quantization = Literal["fp8"]
QuantizedProducts = Literal["native", "dequantize"]
ModelImpl = Literal["auto", "native", "transformers"]


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """One engine: one model on tp_size ranks.

    ep_size: into so many parts of the ranks the experts of a mixture are divided; the ranks of a
    part, tp_size / ep_size of them, cut the width of each. 1 cuts the width over all ranks.

    model: "builtin", "builtin-draft" or a folder in Hugging Face layout with safetensors weights.
    served_model_name: what ModelInfo calls it; None takes the built-in's name or the folder's.
    device: "auto" takes CUDA when there is any. dtype "auto": the checkpoint's own on CUDA, float32
    on CPU. load_format "dummy": random weights from dummy_weights_seed, for benchmarks.
    kv_cache_dtype "auto": the dtype of the weights; "fp8_e4m3": half of bfloat16, with the
    checkpoint's scales, or 1 where it has none.
    quantization: None serves weights as the checkpoint stores them; "fp8" rounds linear layers of
    an unquantised one while it is read, with a scale a row.
    quantized_products: "native": on CUDA from sm90 on, quantised weights stay as they are in memory
    where products take their format and the dtype; "dequantize": they become matrices of the
    model's dtype while they are read, as they do everywhere else.
    weights_cache_dir: a folder on a disk of this machine's own, into which the first process copies
    the weights and from which all processes here read them; None reads the model folder itself.
    weights_cache_bytes: of all models in there together.
    attention_backend: None takes what is best here, by an order of preferences; "auto-tuned" what
    is the fastest here, by measurement, for each kind of step. prefill_attention_backend,
    decode_attention_backend: another one for steps of that phase, over the same pages.
    max_context_len: None takes the model's. page_size: None takes the attention backend's best.
    num_pages: None measures free memory on CUDA and takes kv_cache_bytes on CPU.
    num_state_snapshots: of models that keep states, how many of these are kept for prefixes in the
    cache; 0 goes without one. None: as many as max_running_requests, at least 16, but not more than
    half of the memory for pages; none where modules take tokens on top of a state one by one.
    enable_cuda_graphs: decode steps replay captured graphs where backend and model allow it.
    enable_peer_memory: ranks on GPUs add their partial sums up in kernels that read each other's
    memory, where they can; off, or where they cannot: by NCCL.
    speculative: who proposes drafts of the next tokens, which one step verifies together; texts are
    the same with and without. METHOD or METHOD:MODEL, see speculation. "ngram" looks the last
    tokens up in the request's own text, "suffix" in recent outputs of others of its salt, too, and
    proposes as much as it found alike; "draft:MODEL" is a smaller model of the same vocabulary,
    given as model is, "eagle3:FOLDER" a head that reads the model's states ("builtin-head" is the
    built-in model's), "mtp" the layer for
    that behind its checkpoint's last one, "dflash:FOLDER" a model that makes a block of drafts of
    these states in one pass (on CPU only); they share what there is of KV memory.
    max_draft_tokens: of a request and step; draft_policy: who chooses how many of them a step has.
    draft_tree: of all but "ngram" and "dflash", how many of the likeliest drafts a step verifies
    one, two, ... tokens ahead, [4, 4, 2] for 10 together, whatever max_draft_tokens is; empty: one
    behind the other. On CPU only.
    draft_quantization: of the draft model or the EAGLE-3 head; "fp8" rounds linear layers of its
    unquantised checkpoint as quantization does the model's, the head's logits among them, so that a
    draft reads half the bytes on CUDA from sm90 on. Texts stay. None: a draft model follows
    quantization, a head is as its checkpoint has it.
    deterministic: a request has the same tokens and log probabilities, bit for bit, whatever shares
    its batch, however its prompt is cut and whatever is cached: by kernels that do not depend on
    these, on CPU token by token. What cannot is refused at the start, with the reason.
    max_loras: low-rank adapters that running requests may have together, in memory of the device; 0
    serves none. max_lora_rank: of an adapter. max_cpu_loras: that are kept in each rank's host
    memory; requests with more than these at a time are refused with QUEUE_FULL. lora_embeddings,
    lora_experts: whether adapters may change the embedding and experts, for which every slot takes
    memory, changed or not.
    attention_timing_interval_steps: on CUDA, attention is timed in every Nth replay of a graph size
    and in eager steps; 0 times none.
    expert_load_interval_steps: of a native mixture, tokens of experts are counted and read with
    every Nth step; 0 counts none. expert_load_file: where what was read is kept, for later starts.
    num_redundant_experts: of every layer, room for so many copies of experts on all parts of the
    ranks together (ep_size); a start fills it with the busiest ones of expert_load_file.
    max_step_tokens: token budget of one step, decode rows first, the rest for prefill chunks.
    target_inter_token_ms: while requests decode, a step takes only as many prompt tokens as are
    predicted to keep it under this. None: up to max_step_tokens, for whom nobody waits token by
    token; a service sets it.
    num_cpu_threads: torch threads of one rank on CPU, None takes its share of the cores less one.
    check_integrity_when_idle: prove the page accounting whenever the last request has ended; a
    violation ends the engine.
    max_waiting_requests, max_waiting_tokens: beyond either, submit refuses with QUEUE_FULL.
    media_store_bytes: on each rank, embeddings of images that steps under way show; a larger image
    is refused. max_media_bytes: of the images that all requests at hand have brought, beyond which
    submit refuses with QUEUE_FULL who brings more.
    seed: draws the seeds of requests that bring none, in the order in which they come; None takes
    entropy, so that no two engines and no two starts draw alike.
    """

    model: str = "builtin"
    served_model_name: str | None = None
    model_impl: ModelImpl = "auto"
    device: str = "auto"
    dtype: DType = "auto"
    kv_cache_dtype: KVCacheDType = "auto"
    load_format: LoadFormat = "safetensors"
    quantization: Quantization | None = None
    quantized_products: QuantizedProducts = "native"
    weights_cache_dir: str | None = None
    weights_cache_bytes: int = 200 << 30
    tp_size: int = 1
    ep_size: int = 1
    attention_backend: str | None = None
    prefill_attention_backend: str | None = None
    decode_attention_backend: str | None = None
    page_size: int | None = None
    num_pages: int | None = None
    kv_cache_bytes: int = 1 << 30
    num_state_snapshots: int | None = None
    gpu_memory_fraction: float = 0.85
    num_cpu_threads: int | None = None
    max_context_len: int | None = None
    max_running_requests: int = 256
    max_step_tokens: int = 8192
    target_inter_token_ms: float | None = None
    max_waiting_requests: int = 4096
    max_waiting_tokens: int = 1 << 22
    media_store_bytes: int = 1 << 28
    max_media_bytes: int = 1 << 30
    enable_prefix_cache: bool = True
    enable_mixed_batches: bool = True
    enable_overlap: bool = True
    enable_cuda_graphs: bool = True
    enable_peer_memory: bool = True
    speculative: str | None = None
    max_draft_tokens: int = 4
    draft_policy: DraftPolicyName = "adaptive"
    draft_tree: tuple[int, ...] = ()
    draft_quantization: DraftQuantization | None = None
    max_loras: int = 0
    max_lora_rank: int = 64
    max_cpu_loras: int = 256
    lora_embeddings: bool = False
    lora_experts: bool = False
    deterministic: bool = False
    attention_timing_interval_steps: int = 128
    expert_load_interval_steps: int = 0
    expert_load_file: str | None = None
    num_redundant_experts: int = 0
    check_integrity_when_idle: bool = False
    seed: int | None = None
    dummy_weights_seed: int = 0

    @property
    def prefill_backend(self) -> str | None:
        """What was asked for, for steps in which some row has several new tokens."""
        return self.prefill_attention_backend or self.attention_backend

    @property
    def decode_backend(self) -> str | None:
        return self.decode_attention_backend or self.attention_backend

    @property
    def target_inter_token_s(self) -> float | None:
        milliseconds = self.target_inter_token_ms
        return None if milliseconds is None else milliseconds / 1e3

    @property
    def speculation(self) -> SpeculativeConfig | None:
        """What speculative, max_draft_tokens, draft_policy and draft_tree say together; None: no
        drafts."""
        if self.speculative is None:
            return None
        return SpeculativeConfig.parse(
            self.speculative, self.max_draft_tokens, self.draft_policy, self.draft_tree
        )

    def __post_init__(self) -> None:
        positive = (
            "tp_size",
            "ep_size",
            "kv_cache_bytes",
            "weights_cache_bytes",
            "max_running_requests",
            "max_step_tokens",
            "max_waiting_requests",
            "max_waiting_tokens",
            "media_store_bytes",
            "max_media_bytes",
        )
        for name in positive:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        self._check_ranks()
        check_draft_limits(self.max_draft_tokens, self.draft_policy)
        check_tree(self.draft_tree)
        if self.draft_quantization is not None:
            check_quantization(self.draft_quantization, self.speculation)
        if self.speculation is not None:
            self._check_deterministic()
        for name in ("page_size", "num_pages", "max_context_len", "num_cpu_threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1 when given, got {value}")
        if self.num_state_snapshots is not None and self.num_state_snapshots < 0:
            raise ConfigError(
                f"num_state_snapshots must not be negative, got {self.num_state_snapshots}"
            )
        if self.target_inter_token_ms is not None and self.target_inter_token_ms <= 0.0:
            raise ConfigError(
                "target_inter_token_ms must be above 0 when given, "
                f"got {self.target_inter_token_ms}"
            )
        self._check_intervals()
        self._check_redundant_experts()
        self._check_loras()
        if not 0.0 < self.gpu_memory_fraction <= 1.0:
            raise ConfigError(
                f"gpu_memory_fraction must lie in (0, 1], got {self.gpu_memory_fraction}"
            )

    def _check_redundant_experts(self) -> None:
        num_copies = self.num_redundant_experts
        if num_copies < 0 or num_copies % self.ep_size:
            raise ConfigError(
                f"num_redundant_experts={num_copies} is no multiple of ep_size={self.ep_size}: "
                "every part of the ranks has room for equally many"
            )
        if num_copies == 0:
            return
        if self.ep_size == 1:
            raise ConfigError("num_redundant_experts needs an ep_size above 1")
        if self.expert_load_file is None:
            raise ConfigError("num_redundant_experts needs an expert_load_file to go by")
        if self.deterministic:
            raise ConfigError(
                "deterministic and num_redundant_experts: which rank computes a token's expert "
                "depends on its place in the step"
            )

    def _check_intervals(self) -> None:
        for name in ("attention_timing_interval_steps", "expert_load_interval_steps"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative, got {getattr(self, name)}")

    def _check_ranks(self) -> None:
        if self.tp_size % self.ep_size:
            raise ConfigError(
                f"ep_size={self.ep_size} does not divide tp_size={self.tp_size}: experts are "
                "divided over equal parts of the ranks"
            )

    def _check_loras(self) -> None:
        if self.max_loras < 0:
            raise ConfigError(f"max_loras must not be negative, got {self.max_loras}")
        if not 1 <= self.max_lora_rank <= MAX_LORA_RANK:
            raise ConfigError(
                f"max_lora_rank must lie in [1, {MAX_LORA_RANK}], got {self.max_lora_rank}"
            )
        if self.max_cpu_loras < self.max_loras:
            raise ConfigError(
                f"max_cpu_loras={self.max_cpu_loras} must be at least max_loras={self.max_loras}: "
                "what the device has comes from the host"
            )
        for name in ("lora_embeddings", "lora_experts"):
            if getattr(self, name) and not self.max_loras:
                raise ConfigError(f"{name}: adapters need slots of the device; set max_loras")

    def _check_deterministic(self) -> None:
        if self.deterministic:
            raise ConfigError(
                f"deterministic and speculative={self.speculative!r}: a step verifies as many "
                "drafts as there are; leave one of the two out"
            )
