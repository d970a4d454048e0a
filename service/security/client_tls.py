"""TLS of our clients: whom they trust and, for mutual TLS, what they present."""

import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc

from workers.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ClientTls:
    """PEM files. The certificate and its key come together or not at all."""

    ca_file: Path
    certificate_file: Path | None = None
    key_file: Path | None = None

    def __post_init__(self) -> None:
        if (self.certificate_file is None) != (self.key_file is None):
            raise ConfigError("a client certificate needs its key, and a key its certificate")

    def to_ssl_context(self) -> ssl.SSLContext:
        """Trusts the authorities of ca_file only. Raises ConfigError."""
        try:
            context = ssl.create_default_context(cafile=self.ca_file)
            if self.certificate_file is not None:
                context.load_cert_chain(self.certificate_file, self.key_file)
        except (OSError, ValueError) as error:
            raise ConfigError(f"TLS files of the client: {error}") from error
        return context

    def to_grpc_credentials(self) -> grpc.ChannelCredentials:
        """Trusts the authorities of ca_file only. Raises ConfigError."""
        self.to_ssl_context()  # gRPC itself says nothing about files that hold no certificate
        certificate, key = self.certificate_file, self.key_file
        return grpc.ssl_channel_credentials(
            root_certificates=self.ca_file.read_bytes(),
            private_key=None if key is None else key.read_bytes(),
            certificate_chain=None if certificate is None else certificate.read_bytes(),
        )
