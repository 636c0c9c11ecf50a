"""Errors that a user can fix: the message names the file, line or field; the code is stable."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Self


class CareError(Exception):
    """Base class of all errors whose message is shown to the user.

    Messages may change; programs and tests use the code and the fields.

    Attributes:
        code: Identifier of the error in snake_case; by default `default_code` of the class.
        fields: Values in the message, such as `path`, `line`, `field`, `id` and counts, as JSON
            types.
    """

    default_code: ClassVar[str] = "error"

    def __init__(self, message: str, *, code: str | None = None, **fields: Any) -> None:
        super().__init__(message)
        self.code = code or self.default_code
        self.fields = {name: _json(value) for name, value in fields.items()}

    def __reduce__(self) -> tuple[Any, ...]:
        # Exception would call __init__ with the message alone, which subclasses do not take.
        return Exception.__new__, (type(self), *self.args), self.__dict__

    @classmethod
    def at(cls, path: Path | str, reason: str, code: str, /, **fields: Any) -> Self:
        """Returns an error of a file or folder; the message is the path followed by `reason`."""
        return cls(f"{path} {reason}", code=code, path=path, **fields)


class DataError(CareError):
    """A file of records cannot be read, or one of its records is invalid."""

    default_code = "bad_data"


class CorpusError(CareError):
    """A corpus cannot be read, or too many of its records are rejected."""

    default_code = "bad_corpus"


class PairError(CareError):
    """A pair of encoders is unknown, incomplete, or its files do not match its TOML file."""

    default_code = "bad_pair"


class ProviderError(CareError):
    """The runtime of an encoder is not installed, does not start, or lacks an operator."""

    default_code = "provider_unavailable"


class VectorError(CareError):
    """An encoder returned vectors that cannot be used."""

    default_code = "bad_vectors"


class IndexVersionError(CareError):
    """An index version is missing, incomplete, corrupt or of another schema."""

    default_code = "bad_index_version"


class EmbeddingSpaceError(IndexVersionError):
    """An index and a query encoder have different embedding spaces."""

    default_code = "embedding_space_mismatch"


class QueryError(CareError):
    """A query is not valid for the index; `field` names the invalid field."""

    default_code = "invalid_query"

    def __init__(self, field: str, message: str, *, code: str | None = None, **more: Any) -> None:
        super().__init__(message, code=code, field=field, **more)
        self.field = field

    def of(self, place: str) -> "QueryError":
        """Returns the error of a query in a place, such as `queries.3.`, which its field names."""
        more = {name: value for name, value in self.fields.items() if name != "field"}
        return QueryError(place + self.field, str(self), code=self.code, **more)


class EmbeddingServerError(CareError):
    """An embedding server cannot be reached, rejects requests, or fails repeatedly."""

    default_code = "embedding_server_failed"


class TextRejectedError(EmbeddingServerError):
    """An embedding server rejects one text; `position` is its index in the call of `encode`."""

    default_code = "text_refused"

    def __init__(self, message: str, position: int) -> None:
        super().__init__(message, position=position)
        self.position = position


@contextmanager
def required_packages(feature: str, hint: str) -> Iterator[None]:
    """Turns a failed import into a ProviderError that names the package and how to install it."""
    try:
        yield
    except ModuleNotFoundError as error:
        message = f"{feature} needs {error.name}, which is not installed: {hint}"
        raise ProviderError(message, code="missing_package", package=error.name) from error


def _json(value: Any) -> Any:
    if isinstance(value, str | int | float | bool | None):
        return value
    if isinstance(value, list | tuple):
        return [_json(item) for item in value]
    return str(value)


def describe(error: BaseException) -> dict[str, Any]:
    """Returns the type and the traceback of an error as fields of a log line.

    Of values that a model refused it also says which and why; the values can be private.
    """
    from pydantic import ValidationError  # commands start faster without it

    place = "".join(traceback.format_tb(error.__traceback__))
    fields = {"error": type(error).__name__, "traceback": place}
    if isinstance(error, ValidationError):  # without the values
        wrong = (f"{'.'.join(map(str, one['loc']))} {one['type']}" for one in error.errors())
        fields["reason"] = "; ".join(wrong)
    return fields
