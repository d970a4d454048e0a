"""The registry's audit log, as an ingress reaches it."""

import ray

from service.deployments.control_plane import ActorHandle
from service.errors import ApiError, ApiErrorCode


class RemoteAudit:
    """For calls that are carried out elsewhere than in the registry."""

    def __init__(self, registry: ActorHandle, ingress_id: str) -> None:
        self._registry = registry
        self._ingress_id = ingress_id

    async def record(self, action: str, by: str) -> None:
        """by: a request's id. Raises ApiError: what cannot be written down is not done."""
        caller = f"request {by} at ingress {self._ingress_id}"
        try:
            await self._registry.audit.remote(action, caller)
        except ray.exceptions.RayError as error:
            raise ApiError(ApiErrorCode.UNAVAILABLE, "the registry does not answer") from error
