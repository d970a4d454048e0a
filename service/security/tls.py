"""TLS of the servers: certificate, key and, for mutual TLS, the authority of clients.

Files, read when a server starts and when service/security/renewal.py sees them change. Knows
neither uvicorn nor a route; gRPC's credentials are values of the grpc package.
"""

import ssl
from pathlib import Path

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

    def to_ssl_context(self) -> ssl.SSLContext:
        """Of a server that speaks HTTP/1.1. Raises OSError if a file has gone since check()."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=self.client_ca_file)
        context.load_cert_chain(self.certificate_file, self.key_file, _refuse_password)
        context.set_alpn_protocols(["http/1.1"])
        if self.client_ca_file is not None:
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    @property
    def files(self) -> tuple[Path, ...]:
        """What is read."""
        given = (self.certificate_file, self.key_file, self.client_ca_file)
        return tuple(file for file in given if file is not None)

    def load_grpc_certificates(self) -> grpc.ServerCertificateConfiguration:
        """Raises OSError if a file has gone since check()."""
        pair = (self.key_file.read_bytes(), self.certificate_file.read_bytes())
        authorities = None if self.client_ca_file is None else self.client_ca_file.read_bytes()
        return grpc.ssl_server_certificate_configuration([pair], authorities)


class GrpcTls:
    """The certificates of a gRPC server. Connections that are open keep theirs."""

    def __init__(self, settings: TlsSettings) -> None:
        """Raises OSError if a file has gone since TlsSettings.check()."""
        self._certificates = settings.load_grpc_certificates()
        # gRPC asks for every handshake, on a thread of its own.
        self.credentials = grpc.dynamic_ssl_server_credentials(
            self._certificates,
            lambda: self._certificates,
            require_client_authentication=settings.client_ca_file is not None,
        )

    def use(self, certificates: grpc.ServerCertificateConfiguration) -> None:
        """For every handshake from now on."""
        self._certificates = certificates


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
