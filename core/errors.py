"""Errors that a user can act on: each is one sentence that names the file, line or field."""


class CareError(Exception):
    """Base of all errors whose message is meant for the user."""


class CorpusError(CareError):
    """A corpus cannot be read, or too much of it was rejected."""


class PairError(CareError):
    """A pair of encoders is unknown, incomplete or does not match its description."""


class ProviderError(CareError):
    """What an encoder shall run on is not installed, does not start or lacks an operator."""


class VectorError(CareError):
    """An encoder returned vectors that cannot be used."""


class TrainingError(CareError):
    """A recipe, its data or its starts are wrong, or a run cannot go on."""


class IndexVersionError(CareError):
    """An index version is missing, incomplete, corrupt or of another schema."""


class EmbeddingSpaceError(IndexVersionError):
    """An index was made in another embedding space than the query encoder's."""


class QueryError(CareError):
    """A query asks for what the index cannot answer; carries the field at fault."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class EmbeddingServerError(CareError):
    """A server of embeddings cannot be reached, refuses, or goes on failing."""


class TextRefusedError(EmbeddingServerError):
    """A server refuses one text; carries its position among those that `encode` was given."""

    def __init__(self, message: str, position: int) -> None:
        super().__init__(message)
        self.position = position


class LanguageModelError(CareError):
    """A server of a language model cannot be reached, refuses, or goes on failing."""


class BudgetError(LanguageModelError):
    """The next call to a language model could exceed the budget."""
