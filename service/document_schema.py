"""The HTTP contract of documents that are read by their ids, or listed."""

from typing import Any

from pydantic import BaseModel, Field

from service.schemas import IndexReference


class PassageResponse(BaseModel):
    """A chunk of a document."""

    id: str = Field(description="Id of the chunk.")
    chunk: int = Field(description="Number of the chunk in its document, from 0.")
    text: str


class DocumentResponse(BaseModel):
    """A document, or a chunk of one."""

    id: str
    title: str
    text: str | None = Field(
        description="The text; null for a document that is split: `passages` have its text."
    )
    metadata: dict[str, Any]
    parent: str | None = Field(
        None, description="Id of the chunk's document, in an index of chunks."
    )
    chunk: int | None = Field(None, description="Number of the chunk in its document, from 0.")
    chunks: int | None = Field(
        None, description="Number of chunks of the document, in an index of chunks."
    )
    passages: list[PassageResponse] = Field(
        description="The chunks of a document that is split, in order; neighbours can share "
        "sentences. Empty for a chunk or a document that is not split."
    )
    index: IndexReference


class ListedDocument(BaseModel):
    """A document of a list."""

    id: str
    title: str
    chunks: int | None = Field(
        None, description="Number of chunks of the document, in an index of chunks."
    )


class DocumentsResponse(BaseModel):
    """Documents of an index version, in the order of its corpus."""

    documents: list[ListedDocument]
    next: str | None = Field(
        description="What `after` has to be for those that follow; null for the last ones."
    )
    total: int = Field(description="Number of documents in the version.")
    index: IndexReference
