"""Mixtures of experts read from Hugging Face configs, one function a family of checkpoints.

Knows no tensors and nothing of attention.
"""

from typing import Any

from workers.errors import ModelLoadError
from workers.layers.moe.routing import (
    GroupedSigmoidRouting,
    GroupedSoftmaxRouting,
    Routing,
    SigmoidRouting,
    SoftmaxRouting,
)
from workers.layers.moe.spec import ExpertNames, MixtureSpec, SharedExperts, num_pieces_of
from workers.layers.routed_experts import Gating


def mixtral_mixture(config: Any) -> MixtureSpec:
    return MixtureSpec(
        num_experts=config.num_local_experts,
        width=config.intermediate_size,
        routing=SoftmaxRouting(config.num_experts_per_tok, is_normed=True),
        names=ExpertNames(block="block_sparse_moe", gate="w1", up="w3", down="w2"),
    )


def qwen3_mixture(config: Any) -> MixtureSpec:
    return MixtureSpec(
        num_experts=config.num_experts,
        width=config.moe_intermediate_size,
        routing=SoftmaxRouting(config.num_experts_per_tok, config.norm_topk_prob),
    )


def qwen2_mixture(config: Any) -> MixtureSpec:
    """Raises ModelLoadError where shared experts are no multiple of a routed one."""
    num_pieces = num_pieces_of(config.shared_expert_intermediate_size, config.moe_intermediate_size)
    return MixtureSpec(
        num_experts=config.num_experts,
        width=config.moe_intermediate_size,
        routing=SoftmaxRouting(config.num_experts_per_tok, config.norm_topk_prob),
        shared=SharedExperts(num_pieces, "shared_expert", "shared_expert_gate"),
    )


def gpt_oss_mixture(config: Any) -> MixtureSpec:
    return MixtureSpec(
        num_experts=config.num_local_experts,
        width=config.intermediate_size,
        routing=SoftmaxRouting(config.num_experts_per_tok, is_normed=True),
        names=ExpertNames(router="router", is_stacked=True),
        # Fields of configs only since transformers 5.20; until then these numbers in the code.
        gating=Gating(getattr(config, "swiglu_alpha", 1.702), getattr(config, "swiglu_limit", 7.0)),
        has_bias=True,
        has_router_bias=True,
    )


def llama4_mixture(config: Any) -> MixtureSpec:
    return MixtureSpec(
        num_experts=config.num_local_experts,
        width=config.intermediate_size,
        routing=SigmoidRouting(config.num_experts_per_tok),
        names=ExpertNames(block="feed_forward", router="router", is_stacked=True, in_turns=False),
        shared=SharedExperts(1, "shared_expert"),
        weighs_inputs=True,
    )


def grouped_mixture(config: Any) -> MixtureSpec:
    """DeepSeek-V3, GLM-4.5 and their kin."""
    return _with_shared(
        config,
        GroupedSigmoidRouting(
            num_chosen=config.num_experts_per_tok,
            num_groups=config.n_group or 1,
            num_chosen_groups=config.topk_group or 1,
            is_normed=config.norm_topk_prob,
            factor=config.routed_scaling_factor,
        ),
    )


def deepseek_v2_mixture(config: Any) -> MixtureSpec:
    """Raises ModelLoadError for a topk_method that transformers does not know either."""
    num_chosen, factor = config.num_experts_per_tok, config.routed_scaling_factor
    if config.topk_method == "greedy":
        return _with_shared(config, SoftmaxRouting(num_chosen, is_normed=False, factor=factor))
    if config.topk_method != "group_limited_greedy":
        raise ModelLoadError(f"topk_method {config.topk_method!r} is not known")
    routing = GroupedSoftmaxRouting(num_chosen, config.n_group or 1, config.topk_group or 1, factor)
    return _with_shared(config, routing)


def _with_shared(config: Any, routing: Routing) -> MixtureSpec:
    num_shared = config.n_shared_experts
    return MixtureSpec(
        num_experts=config.n_routed_experts,
        width=config.moe_intermediate_size,
        routing=routing,
        shared=SharedExperts(num_shared) if num_shared else None,
    )


def qwen_dense_layers(config: Any) -> frozenset[int]:
    """Of Qwen's mixtures, by config.mlp_only_layers and decoder_sparse_step. Raises ModelLoadError
    for steps of no layers."""
    if config.decoder_sparse_step < 1:
        raise ModelLoadError(f"decoder_sparse_step {config.decoder_sparse_step} is less than 1")
    step, all_layers = config.decoder_sparse_step, range(config.num_hidden_layers)
    by_step = {layer for layer in all_layers if (layer + 1) % step}
    return frozenset(by_step | set(config.mlp_only_layers))


def first_layers(num_dense: int, config: Any) -> frozenset[int]:
    return frozenset(range(min(num_dense, config.num_hidden_layers)))
