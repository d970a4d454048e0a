"""Settings of API keys, validated where the service's configuration is. Knows no request."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    SecretStr,
    field_validator,
    model_validator,
)

from service.security.api_keys import ApiKey, check_distinct, parse_key_file
from service.security.priorities import PriorityRange
from service.security.quota import KeyLimits
from workers.errors import ConfigError


class AuthSettings(BaseModel):
    """API keys that clients may present; none means no authentication.

    api_key_file: one key a line, with limits of its own if it has any (service/security/api_keys).
    api_keys: comma-separated when given by environment. limits: of every key, in each ingress
    process, unless the file says otherwise. priorities: of every request, with a key or without,
    unless the file says otherwise. salt_prefix_cache_by_key: clients with different keys share no
    cached prefix, so none can tell from latency or usage what another has sent. admin_api_keys,
    admin_api_key_file (one key a line): of calls that change what is served, which there are only
    where such keys are; they are no keys of clients.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    api_key_file: Path | None = None
    api_keys: tuple[SecretStr, ...] = ()
    limits: KeyLimits = KeyLimits()
    priorities: PriorityRange = PriorityRange()
    salt_prefix_cache_by_key: bool = True
    admin_api_key_file: Path | None = None
    admin_api_keys: tuple[SecretStr, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _split(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        lists = {
            name: [key.strip() for key in data[name].split(",")]
            for name in ("api_keys", "admin_api_keys")
            if isinstance(data.get(name), str)
        }
        return {**data, **lists}

    @field_validator("api_keys", "admin_api_keys")
    @classmethod
    def _refuse_empty_keys(cls, keys: tuple[SecretStr, ...]) -> tuple[SecretStr, ...]:
        # An unset secret must not open the service, nor an empty key match an empty header.
        if not all(key.get_secret_value().strip() for key in keys):
            raise ValueError("an API key is empty")
        return keys

    @model_validator(mode="after")
    def _check(self) -> Self:
        has_keys = bool(self.api_keys) or self.api_key_file is not None
        if not has_keys and self.limits != KeyLimits():
            raise ValueError("limits by key need API keys")
        return self

    def check_files(self) -> None:
        """Raises ConfigError where keys cannot be loaded."""
        self.load_keys()
        self.load_admin_keys()

    def load_admin_keys(self) -> tuple[str, ...]:
        """Raises ConfigError if the file cannot be read or holds none."""
        keys = [key.get_secret_value().strip() for key in self.admin_api_keys]
        if self.admin_api_key_file is not None:
            try:
                lines = self.admin_api_key_file.read_text("utf-8-sig").split()
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"auth.admin_api_key_file: {error}") from error
            if not lines:
                raise ConfigError(f"auth.admin_api_key_file: {self.admin_api_key_file} is empty")
            keys += lines
        return tuple(keys)

    def load_keys(self) -> tuple[ApiKey, ...]:
        """All keys. Raises ConfigError if the file cannot be read or holds none."""
        keys = [
            ApiKey(key.get_secret_value().strip(), f"key-{number}", self.limits, self.priorities)
            for number, key in enumerate(self.api_keys, 1)
        ]
        try:
            if self.api_key_file is not None:
                text = self.api_key_file.read_text("utf-8-sig")
                found = parse_key_file(text, self.limits, self.priorities)
                if not found:
                    raise ConfigError(f"{self.api_key_file} holds no key")
                keys += found
        except (OSError, UnicodeDecodeError, ConfigError) as error:
            raise ConfigError(f"auth.api_key_file: {error}") from error
        check_distinct(keys)
        return tuple(keys)
