"""Errors that a user can act on: a message that names file, line or field, and a stable code."""

from pathlib import Path
from typing import Any, ClassVar, Self


class CareError(Exception):
    """Base of all errors whose message is meant for the user.

    The message may be reworded; programs and tests go by the code and the fields.

    Attributes:
        code: Identifier of the error in snake_case; if none is given, that of its class.
        fields: What the message names: `path`, `line`, `field`, `id`, counts; values of JSON.
    """

    default_code: ClassVar[str] = "error"

    def __init__(self, message: str, *, code: str | None = None, **fields: Any) -> None:
        super().__init__(message)
        self.code = code or self.default_code
        self.fields = {name: _json(value) for name, value in fields.items()}

    @classmethod
    def at(cls, path: Path | str, reason: str, code: str, /, **fields: Any) -> Self:
        """Returns the error of a file or folder; the message is its path and the reason."""
        return cls(f"{path} {reason}", code=code, path=path, **fields)


class DataError(CareError):
    """A file of records cannot be read, or a record of it is wrong."""

    default_code = "bad_data"


class CorpusError(CareError):
    """A corpus cannot be read, or too much of it was rejected."""

    default_code = "bad_corpus"


class PairError(CareError):
    """A pair of encoders is unknown, incomplete or does not match its description."""

    default_code = "bad_pair"


class ProviderError(CareError):
    """What an encoder runs on is not installed, does not start or lacks an operator."""

    default_code = "provider_unavailable"


class VectorError(CareError):
    """An encoder returned vectors that cannot be used."""

    default_code = "bad_vectors"


class IndexVersionError(CareError):
    """An index version is missing, incomplete, corrupt or of another schema."""

    default_code = "bad_index_version"


class EmbeddingSpaceError(IndexVersionError):
    """An index was made in another embedding space than the query encoder's."""

    default_code = "embedding_space_mismatch"


class QueryError(CareError):
    """A query asks for what the index cannot answer; carries the field at fault."""

    default_code = "invalid_query"

    def __init__(self, field: str, message: str, *, code: str | None = None, **more: Any) -> None:
        super().__init__(message, code=code, field=field, **more)
        self.field = field


class EmbeddingServerError(CareError):
    """A server of embeddings cannot be reached, refuses, or goes on failing."""

    default_code = "embedding_server_failed"


class TextRefusedError(EmbeddingServerError):
    """A server refuses one text; carries its position among those that `encode` was given."""

    default_code = "text_refused"

    def __init__(self, message: str, position: int) -> None:
        super().__init__(message, position=position)
        self.position = position


def _json(value: Any) -> Any:
    if isinstance(value, str | int | float | bool | None):
        return value
    if isinstance(value, list | tuple):
        return [_json(item) for item in value]
    return str(value)
