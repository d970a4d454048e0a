"""The registry's board of adapters, as an ingress reaches it."""

from collections.abc import Sequence

import ray

from service.adapters.lease import FolderClaim, FolderLease
from service.adapters.table import AdapterEntry, AdapterTable
from service.deployments.control_plane import ActorHandle
from service.errors import ApiError, ApiErrorCode


class RemoteAdapterBoard:
    """An AdapterBoardClient and a FolderBoardClient."""

    def __init__(self, registry: ActorHandle, ingress_id: str, node_id: str) -> None:
        self._registry = registry
        self._ingress_id = ingress_id
        self._node_id = node_id

    async def set(
        self, entry: AdapterEntry, known: AdapterTable, action: str, by: str
    ) -> AdapterTable:
        """by: the request's id, which the log of requests has, too."""
        set_adapter = self._registry.set_adapter.remote
        caller = f"request {by} at ingress {self._ingress_id}"
        try:
            table: AdapterTable = await set_adapter(entry, known, action, caller)
        except ray.exceptions.RayError as error:
            raise ApiError(ApiErrorCode.UNAVAILABLE, "the registry does not answer") from error
        return table

    async def restore(self, table: AdapterTable) -> None:
        try:
            await self._registry.restore_adapters.remote(table)
        except ray.exceptions.RayError as error:
            raise ApiError(ApiErrorCode.UNAVAILABLE, "the registry does not answer") from error

    async def lease_folder(self, model: str, for_s: float, device: int | None) -> FolderLease:
        claim = FolderClaim(model, self._ingress_id, self._node_id, for_s, device)
        try:
            lease: FolderLease = await self._registry.lease_folder.remote(claim)
        except ray.exceptions.RayError as error:
            raise ApiError(ApiErrorCode.UNAVAILABLE, "the registry does not answer") from error
        return lease

    async def set_from_folder(
        self, model: str, entries: Sequence[AdapterEntry], known: AdapterTable
    ) -> AdapterTable:
        """model: whose folder it is, for the audit log."""
        by = f"folder of {model} at ingress {self._ingress_id}"
        try:
            table: AdapterTable = await self._registry.set_folder_adapters.remote(
                entries, known, by
            )
        except ray.exceptions.RayError as error:
            raise ApiError(ApiErrorCode.UNAVAILABLE, "the registry does not answer") from error
        return table
