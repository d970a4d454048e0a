"""What the hub library raises, in words for an operator."""

from collections.abc import Iterator
from contextlib import contextmanager

from httpx2 import HTTPError
from huggingface_hub import constants
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
    XetDownloadError,
)

from service.hub.ids import DEFAULT_REVISION, HubModel
from workers.errors import ModelLoadError


@contextmanager
def describing_failures(model: HubModel) -> Iterator[None]:
    """Turns every failure of a fetch into a ModelLoadError."""
    try:
        yield
    except GatedRepoError as error:
        raise ModelLoadError(
            f"{model.id} is gated: accept its terms at the hub and set HF_TOKEN to a token of that "
            "account"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelLoadError(
            f"{model.id!r} is neither builtin nor a folder, and the hub has no such model, or "
            "HF_TOKEN is not of somebody who may read it"
        ) from error
    except RevisionNotFoundError as error:
        raise ModelLoadError(
            f"{model.id} has no revision {model.revision or DEFAULT_REVISION!r}"
        ) from error
    except HFValidationError as error:
        raise ModelLoadError(f"{model.id!r} is no id of the hub: {error}") from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise ModelLoadError(_unreachable(model)) from error
    except (HfHubHTTPError, HTTPError, XetDownloadError, OSError, ValueError) as error:
        raise ModelLoadError(f"{model} could not be fetched from the hub: {error}") from error


def _unreachable(model: HubModel) -> str:
    if constants.is_offline_mode():
        return (
            f"{model} is not, or not wholly, in the hub's cache, and HF_HUB_OFFLINE is set: fetch "
            f"it once with `tessera fetch {model.id}`"
        )
    return (
        f"{model.id!r} is neither builtin nor a folder here, not wholly in the hub's cache, and "
        f"the hub at {constants.ENDPOINT} cannot be reached"
    )
