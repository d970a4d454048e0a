"""TLS of the servers: certificate, key and, for mutual TLS, the authority of clients.

Files only, read when a server starts: a renewed certificate counts from the next start. Knows
neither uvicorn nor a route; gRPC's credentials are values of the grpc package.
"""

import ssl
from pathlib import Path
from typing import Any

import grpc
from pydantic import BaseModel, ConfigDict

from workers.errors import ConfigError


class TlsSettings(BaseModel):
    """PEM files. certificate_file may hold intermediate certificates after the server's own.

    key_file: unencrypted. client_ca_file: when given, clients must present a certificate that one
    of its authorities signed.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    certificate_file: Path
    key_file: Path
    client_ca_file: Path | None = None

    def check(self, setting: str) -> None:
        """Raise ConfigError that names the field of `setting` that cannot be used, and why."""
        for name in ("certificate_file", "key_file", "client_ca_file"):
            path = getattr(self, name)
            if path is not None:
                _read(path, f"{setting}.{name}")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.certificate_file, self.key_file, _refuse_password)
        except (ssl.SSLError, ValueError) as error:
            raise ConfigError(
                f"{setting}: {self.certificate_file} and {self.key_file} are no certificate and "
                f"its unencrypted key: {_reason(error)}"
            ) from error
        if self.client_ca_file is None:
            return
        try:
            context.load_verify_locations(self.client_ca_file)
        except ssl.SSLError as error:
            raise ConfigError(
                f"{setting}.client_ca_file: {self.client_ca_file} holds no certificate: "
                f"{_reason(error)}"
            ) from error

    def to_uvicorn_options(self) -> dict[str, Any]:
        """Keyword arguments of uvicorn.Config."""
        options: dict[str, Any] = {
            "ssl_certfile": str(self.certificate_file),
            "ssl_keyfile": str(self.key_file),
        }
        if self.client_ca_file is not None:
            options["ssl_ca_certs"] = str(self.client_ca_file)
            options["ssl_cert_reqs"] = ssl.CERT_REQUIRED
        return options

    def to_grpc_credentials(self) -> grpc.ServerCredentials:
        """Raises OSError if a file has gone since check()."""
        pair = (self.key_file.read_bytes(), self.certificate_file.read_bytes())
        if self.client_ca_file is None:
            return grpc.ssl_server_credentials([pair])
        return grpc.ssl_server_credentials(
            [pair],
            root_certificates=self.client_ca_file.read_bytes(),
            require_client_auth=True,
        )


def _read(path: Path, setting: str) -> None:
    try:
        path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{setting}: {error}") from error


def _refuse_password() -> str:
    # Without a callback OpenSSL asks on the terminal, where nobody is.
    raise ValueError("the key is encrypted")


def _reason(error: Exception) -> str:
    reason = getattr(error, "reason", None) or str(error) or type(error).__name__
    return str(reason).lower().replace("_", " ")
