"""What Serve is told about scaling one model's engine replicas.

The chart's templates say the same in YAML (helm/tessera/templates/_serve.tpl).
"""

from typing import Any

from service.config import ModelConfig

POLICY = "service.autoscaling.serve_policy:EngineScalingPolicy"


def scaling_options(app_name: str, model: ModelConfig) -> dict[str, Any]:
    """Options of serve.deployment: a fixed number of replicas, or autoscaling."""
    settings = model.autoscaling
    if settings is None:
        return {"num_replicas": model.num_replicas}
    target_requests = settings.target_requests
    if target_requests is None:
        target_requests = model.engine.max_running_requests
    return {
        "autoscaling_config": {
            "min_replicas": settings.min_replicas,
            "max_replicas": settings.max_replicas,
            "upscale_delay_s": settings.upscale_delay_s,
            "downscale_delay_s": settings.downscale_delay_s,
            "downscale_to_zero_delay_s": settings.scale_to_zero_after_s,
            "policy": {
                "policy_function": POLICY,
                "policy_kwargs": {
                    "app_name": app_name,
                    "model": model.engine.model,
                    "served_name": model.name,
                    "target_queued_tokens": settings.target_queued_tokens,
                    "target_kv_usage": settings.target_kv_usage,
                    "target_requests": target_requests,
                },
            },
        }
    }
