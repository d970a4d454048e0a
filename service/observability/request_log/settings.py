"""How the processes of the service log. Knows no handler and no formatter."""

from typing import Literal

from pydantic import BaseModel, ConfigDict


class LoggingSettings(BaseModel):
    """format "json": one object a line. is_access_log_enabled: one line at each request's end."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal["text", "json"] = "text"
    is_access_log_enabled: bool = True
