"""Settings of CORS: which other origins' pages may call the HTTP API. Knows no request."""

import re
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

EVERY_ORIGIN = "*"
# As browsers write it in `Origin`: lower case, no path, no slash at its end.
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[a-z0-9_.-]+)(:[0-9]{1,5})?")


class CorsSettings(BaseModel):
    """allowed_origins: such as https://app.example.com, or "*" alone; none turns CORS off.

    allow_credentials: lets pages of these origins send cookies and HTTP logins, which a proxy in
    front may ask for; API keys do not need it, and with "*" it is refused. max_age_s: for how long
    a browser may keep what it was told.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    allowed_origins: tuple[str, ...] = ()
    allow_credentials: bool = False
    max_age_s: int = Field(default=600, ge=0, le=86400)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.allow_credentials and EVERY_ORIGIN in self.allowed_origins:
            raise ValueError('allow_credentials needs named origins: "*" is every page there is')
        if self.allow_credentials and not self.allowed_origins:
            raise ValueError("allow_credentials needs allowed_origins")
        if EVERY_ORIGIN in self.allowed_origins and len(self.allowed_origins) > 1:
            raise ValueError('"*" stands alone in allowed_origins')
        for origin in self.allowed_origins:
            if origin != EVERY_ORIGIN and not _ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"{origin!r} is no origin: scheme://host or scheme://host:port, in lower case"
                )
        return self
