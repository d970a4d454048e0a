"""What can be known to fail before Ray starts: the model folder, ports, API keys.

Loads neither torch nor transformers: a wrong flag should cost a second, not a deployment. What only
an engine can tell comes from the replicas (service.deployments.registry.StartFailure).
"""

import socket

from service.config import EngineSettings, ServeConfig
from service.deployments.listeners import check_free, host_and_port
from service.hub.resolve import text_folder
from service.model_names import BUILTIN_FOLDERS
from service.tokenizer.folder import read_tokenizer_files
from workers.errors import ConfigError, ModelLoadError

_RAY_TIMEOUT_S = 5.0


def check_before_start(config: ServeConfig) -> None:
    """For a service on this machine alone. Raises ConfigError or ModelLoadError."""
    for model in config.served_models():
        _check_model(model.engine)
    config.check_files()
    for name, host, port in (
        ("http", config.http.host, config.http.port),
        ("grpc", config.grpc.host, config.grpc.port),
        ("metrics", config.metrics.host, config.metrics.port),
    ):
        try:
            check_free(host, port)
        except OSError as error:
            raise ConfigError(
                f"{name}.port: cannot listen on {host_and_port(host, port)}: "
                f"{error.strerror or error}"
            ) from error


def check_ray_answers(address: str) -> None:
    """Raise ConfigError if nobody listens at host:port, which Ray itself would try for minutes.

    Other forms of address, such as "auto", are left to Ray.
    """
    host, _, port = address.rpartition(":")
    if not host or "/" in address or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), _RAY_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(f"no Ray answers at {address}: {error}") from error


def _check_model(engine: EngineSettings) -> None:
    model = engine.model
    folder = text_folder(model, engine.revision)
    if not folder.is_dir():
        known = " nor ".join(BUILTIN_FOLDERS)
        raise ModelLoadError(
            f"{model!r} is neither {known} nor a folder with a model nor an id of the hub"
        )
    if not (folder / "config.json").is_file():
        raise ModelLoadError(f"{folder} has no config.json")
    read_tokenizer_files(folder)
