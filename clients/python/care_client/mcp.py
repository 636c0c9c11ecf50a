"""`care-mcp`: tools of the Model Context Protocol that search, with passages and filters."""

import argparse
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import uvicorn
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.mcpserver.tools import Tool
from mcp_types import ToolAnnotations
from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from care_client.adapters import metadata
from care_client.async_client import AsyncClient
from care_client.errors import CareClientError
from care_client.exchange import URL
from care_client.models import DocumentResponse, IndexReference, Scalar

# Not CARE_…: the service refuses variables of this prefix that it does not know.
KEY_VARIABLE = "MCP_CARE_KEY"

_INSTRUCTIONS = (
    "Searches passages of Chinese medical text. Write the query in Chinese, as a question in the "
    "user's words. Cite passages by their id. If no passage answers the question, say so: the "
    "passages are no medical advice, and their scores are similarities, not probabilities."
)
_READ_ONLY = ToolAnnotations(read_only_hint=True, idempotent_hint=True, open_world_hint=False)


class Passage(BaseModel):
    """A passage; `metadata` has its fields in the index, and what the service says of the hit."""

    id: str
    score: float
    title: str
    text: str | None
    metadata: dict[str, Any]


class Passages(BaseModel):
    """The passages nearest to a query, best first."""

    passages: list[Passage]
    index: IndexReference


class Filters(BaseModel):
    """The fields that a filter may use, with their most frequent values."""

    filters: dict[str, list[Scalar]]
    filter_field_count: int
    documents: int


class _Tool(Tool):
    """A tool that refuses arguments that it does not have; those of the SDK ignore them."""

    def model_post_init(self, context: Any, /) -> None:
        super().model_post_init(context)
        self.parameters["additionalProperties"] = False

    async def run(self, arguments: dict[str, Any], *args: Any, **more: Any) -> Any:
        known = self.parameters["properties"]
        if unknown := arguments.keys() - known:
            names = ", ".join(sorted(unknown))
            raise ToolError(
                f"{self.name} has no argument {names}: "
                + (f"its arguments are {', '.join(known)}" if known else "it has none")
            )
        return await super().run(arguments, *args, **more)


def make_server(
    url: str = URL,
    api_key: str | None = None,
    *,
    index: str | None = None,
    timeout: float = 10.0,
    options: Mapping[str, Any] | None = None,
) -> MCPServer:
    """Returns a server of the tools `search`, `get_passage` and `list_filters`.

    Args:
        url: Address of the service.
        api_key: Its key, if it has keys.
        index: The index that the tools search, if not the default one.
        timeout: Time of a search [s].
        options: Options of searches, which arguments of the tool replace.
    """
    defaults = {"top_k": 5, "evidence": True, **(options or {})}
    client = AsyncClient(url, index=index, api_key=api_key, timeout=timeout)

    async def search(
        query: Annotated[str, Field(description="The question, in Chinese.")],
        top_k: Annotated[int | None, Field(description="Number of passages.", ge=1)] = None,
        filter: Annotated[
            dict[str, Any] | None,
            Field(
                description="Conditions by field of list_filters; all must hold. A value, a list "
                'of values, {"gte": 2019, "lt": 2024}, or {"not": [values]}.'
            ),
        ] = None,
        min_score: Annotated[float | None, Field(description="Lowest score of a passage.")] = None,
    ) -> Passages:
        """Returns the passages of the medical corpus that are nearest to a question."""
        named = {"top_k": top_k, "filter": filter, "min_score": min_score}
        chosen: Any = {name: value for name, value in named.items() if value is not None}
        for field, value in (filter or {}).items():
            if isinstance(value, str) and _is_object(value):
                message = f"filter.{field} is a text that holds a JSON object: give the object"
                raise ToolError(message)
        try:
            found = await client.search(query, **{**defaults, **chosen})
        except CareClientError as error:
            raise ToolError(str(error)) from error
        passages = [
            Passage(
                id=hit.id,
                score=hit.score,
                title=hit.title,
                text=hit.text,
                metadata={
                    name: value
                    for name, value in metadata(hit).items()
                    if name not in ("score", "title")
                },
            )
            for hit in found.hits
        ]
        return Passages(passages=passages, index=found.index)

    async def get_passage(
        id: Annotated[str, Field(description="Id of a passage, or the `parent` of its metadata.")],
    ) -> DocumentResponse:
        """Returns a passage that was found, or the whole document of its `parent`, by the id."""
        try:
            return await client.document(id)
        except CareClientError as error:
            raise ToolError(str(error)) from error

    async def list_filters() -> Filters:
        """Lists the fields that a filter may use, with their most frequent values."""
        try:
            served = await client.index()
        except CareClientError as error:
            raise ToolError(str(error)) from error
        return Filters(
            filters=served.filters,
            filter_field_count=served.filter_field_count,
            documents=served.documents,
        )

    tools: list[Tool] = [
        _Tool.from_function(function, annotations=_READ_ONLY)
        for function in (search, get_passage, list_filters)
    ]
    server: MCPServer = MCPServer(
        "care", instructions=_INSTRUCTIONS, log_level="WARNING", tools=tools
    )

    @server.custom_route("/health/live", methods=["GET"])
    async def live(_: Request) -> Response:
        return JSONResponse({"status": "live"})

    return server


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def _options(text: str) -> dict[str, Any]:
    if not _is_object(text):
        raise argparse.ArgumentTypeError("must be a JSON object")
    options: dict[str, Any] = json.loads(text)
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the server until its client or a signal ends it."""
    parser = argparse.ArgumentParser("care-mcp", description=__doc__)
    parser.add_argument("--url", default=URL, help="address of the service (%(default)s)")
    parser.add_argument("--index", help="name or alias of the index (default: the service's)")
    parser.add_argument("--timeout", type=float, default=10.0, help="time of a search [s]")
    parser.add_argument("--options", type=_options, help="options of all searches, as JSON")
    parser.add_argument("--transport", choices=["stdio", "http"], default="stdio")
    parser.add_argument("--host", default="127.0.0.1", help="address of --transport http")
    parser.add_argument("--port", type=int, default=8765, help="port of --transport http")
    parser.epilog = f"{KEY_VARIABLE} is the API key of the service."
    given = parser.parse_args(arguments)
    try:
        server = make_server(
            given.url,
            os.environ.get(KEY_VARIABLE),
            index=given.index,
            timeout=given.timeout,
            options=given.options,
        )
    except CareClientError as error:
        parser.error(str(error))
    if given.transport == "stdio":
        # Python would wait for the thread that reads standard input.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        _run(server)
    else:
        app = server.streamable_http_app(host=given.host)
        # A redirect is to the scheme and host that the request names, and can so leave TLS.
        app.router.redirect_slashes = False
        uvicorn.run(app, host=given.host, port=given.port, log_level="warning")


def _run(server: MCPServer) -> None:
    """Runs a server on standard input and output until its client ends."""
    try:
        server.run()
    except* BrokenPipeError:
        # The client has closed standard output, which Python flushes once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
