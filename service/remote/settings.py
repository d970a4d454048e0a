"""Which hosts images may be fetched from, validated where the service's configuration is."""

import re
from ipaddress import IPv4Network, IPv6Network

from pydantic import BaseModel, ConfigDict, Field, field_validator

_LABEL = r"[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?"
_HOST = re.compile(rf"(\*\.)?{_LABEL}(\.{_LABEL})*(:\d{{1,5}})?")


class MediaSettings(BaseModel):
    """Images by URL. Without allowed_hosts none is fetched.

    allowed_hosts: names, "*.example.com" for all below one, ":8443" behind for another port than
    the scheme's. allowed_networks: of addresses that are not public, which hosts may have all the
    same. fetch_timeout_s: for one image, redirects included. max_redirects: each to an allowed
    host. max_fetches_at_once: of an ingress and model.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    allowed_hosts: tuple[str, ...] = ()
    allowed_networks: tuple[IPv4Network | IPv6Network, ...] = ()
    fetch_timeout_s: float = Field(default=5.0, gt=0)
    max_redirects: int = Field(default=2, ge=0, le=10)
    max_fetches_at_once: int = Field(default=32, ge=1)

    @field_validator("allowed_hosts")
    @classmethod
    def _are_hosts(cls, hosts: tuple[str, ...]) -> tuple[str, ...]:
        for host in hosts:
            if not _HOST.fullmatch(host):
                raise ValueError(
                    f"{host!r} is no host: write example.com, *.example.com or example.com:8443"
                )
        return hosts
