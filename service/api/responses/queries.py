"""What stands behind the question mark of a stored response's address."""

from typing import Annotated, Literal, Self, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from starlette.requests import Request

from service.api.openai.parameters import INT32_MAX, from_validation_error
from service.api.responses.requests import Includable
from service.errors import ApiError, ApiErrorCode

_LISTS = {"include": "include", "include[]": "include"}
_OBFUSCATION = "include_obfuscation"
MAX_PAGE = 100


class _Query(BaseModel):
    """Values are texts, so numbers are read from them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    include: Annotated[list[Includable], Field(max_length=len(get_args(Includable)))] = []


class RetrieveQuery(_Query):
    """starting_after: the number of the last event that a client has."""

    stream: bool = False
    starting_after: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = None

    @model_validator(mode="after")
    def _starts_a_stream(self) -> Self:
        if self.starting_after is not None and not self.stream:
            message = "starting_after needs stream=true"
            raise ApiError(ApiErrorCode.INVALID_REQUEST, message, "starting_after")
        return self


class ItemsQuery(_Query):
    """after: an item's id; what comes behind it. order: by when an item came."""

    after: Annotated[str, Field(max_length=256)] | None = None
    limit: Annotated[int, Field(ge=1, le=MAX_PAGE)] = 20
    order: Literal["asc", "desc"] = "desc"


Q = TypeVar("Q", bound=_Query)

RETRIEVE_PARAMETERS = (
    {"name": "stream", "in": "query", "schema": {"type": "boolean"}},
    {"name": "starting_after", "in": "query", "schema": {"type": "integer", "minimum": 0}},
)
ITEMS_PARAMETERS = (
    {"name": "after", "in": "query", "schema": {"type": "string", "maxLength": 256}},
    {
        "name": "limit",
        "in": "query",
        "schema": {"type": "integer", "minimum": 1, "maximum": MAX_PAGE},
    },
    {"name": "order", "in": "query", "schema": {"type": "string", "enum": ["asc", "desc"]}},
)


def read_query(request: Request, model: type[Q]) -> Q:
    """Raises ApiError for names and values that there are not."""
    values: dict[str, object] = {}
    for name, value in request.query_params.multi_items():
        if name in _LISTS:
            included = values.setdefault(_LISTS[name], [])
            assert isinstance(included, list)
            included.append(value)
        elif name == _OBFUSCATION:
            _refuse_unless_off(name, value)
        else:
            values[name] = value
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise from_validation_error(error) from error


def _refuse_unless_off(name: str, value: str) -> None:
    if value.lower() != "false":
        message = f"{name} with this value is not supported"
        raise ApiError(ApiErrorCode.UNSUPPORTED_PARAMETER, message, name)
