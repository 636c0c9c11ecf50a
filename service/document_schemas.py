"""The HTTP contract of documents and of indexes that are created; see `service.schemas`."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field

from service.filter_schema import FilterField
from service.schemas import IndexReference, StrictRequest


class DocumentRecord(BaseModel):
    """A document, in the form of a line of a JSONL corpus."""

    id: str | int = Field(alias="_id", description="Id, unique in the index; or `id`.")
    text: str
    title: str = ""
    metadata: dict[str, Any] = Field(
        default_factory=dict,
        description="Strings, numbers, booleans and lists of them can be used in filters.",
    )


_RECORD = DocumentRecord.model_json_schema()
# Documented only: the body is read by `parse_documents`, and the records by the writer.
DOCUMENTS_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {"anyOf": [_RECORD, {"type": "array", "items": _RECORD}]},
                "examples": {
                    "documents": {
                        "value": [{"_id": "1", "title": "高血压", "text": "少吃盐，多运动。"}]
                    }
                },
            },
            "application/x-ndjson": {"schema": {"type": "string"}},
        },
    }
}


class DeleteRequest(StrictRequest):
    """Which documents to delete: ids, or a filter."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"ids": ["1", "2"]}]})

    ids: Annotated[list[str], FailFast()] = Field(
        default_factory=list, description="At most CARE_MAX_DOCUMENTS ids."
    )
    filter: FilterField = Field(default_factory=dict)


class CreateRequest(StrictRequest):
    """The settings of a new index; without a body it is like the default one."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"like": "sample"}]})

    like: str = Field(
        "",
        description="Name or alias of an index whose encoder, chunking, full text, weights and "
        "token vectors the new one gets; by default CARE_INDEX.",
    )
    filter_fields: Annotated[list[str], FailFast()] = Field(
        default_factory=list,
        max_length=100,
        description="Metadata fields that filters may have before any document has them; others "
        "are added by the documents.",
    )


# Documented only: the route reads the body, because there may be none.
CREATE_BODY: dict[str, Any] = {
    "requestBody": {
        "required": False,
        "content": {"application/json": {"schema": CreateRequest.model_json_schema()}},
    }
}


class DeletedIndexResponse(BaseModel):
    """An index that was deleted."""

    name: str
    documents: int | None = Field(description="How many it had; null if it could not be read.")


class PatchRequest(StrictRequest):
    """What to change of a document."""

    metadata: dict[str, Any] = Field(description="Takes the place of all metadata of the document.")


class RejectedRecord(BaseModel):
    """A document of a request that was not written."""

    position: int = Field(description="Its position in the request, from 0.")
    line: int | None = Field(None, description="Its line, from 1, in lines of JSON.")
    id: str | None = Field(description="Its id, if it has a valid one.")
    code: str = Field(description="Stable identifier of the reason.")
    reason: str


class WriteResponse(BaseModel):
    """What a request has changed."""

    index: IndexReference
    added: int = Field(description="Documents with new ids.")
    replaced: int = Field(description="Documents that were changed.")
    deleted: int
    unchanged: int = Field(description="Documents that are as they were before.")
    missing: list[str] = Field(description="Ids that no document has.")
    rejected: list[RejectedRecord] = Field(
        description="Documents that were not written; of lines of JSON the first 1,000."
    )
    more_rejected: int = Field(0, description="Rejected documents that are not listed.")


class AcceptedResponse(BaseModel):
    """A request that waits for its turn."""

    id: str = Field(description="For GET …/writes/{id}.")


class WriteStateResponse(BaseModel):
    """What became of a request; an error of it is the answer's."""

    state: Literal["waiting", "written"]
    result: WriteResponse | None = Field(description="Null while it waits.")


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
