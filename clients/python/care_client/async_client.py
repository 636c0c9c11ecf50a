"""The client: a method for each route of the service, and how its requests are sent."""

import asyncio
import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any, Self

import httpx2
from typing_extensions import Unpack

from care_client import models as contract
from care_client.connections import AsyncConnections, async_until
from care_client.errors import InvalidRequestError
from care_client.exchange import (
    BATCH,
    DOCUMENTS,
    MAX_RESPONSE_BYTES,
    URL,
    Answer,
    Call,
    Connection,
    M,
    Reply,
    Request,
    added_up,
    checked,
    conditional,
    document_bodies,
    moved,
    number,
    parameters,
    read,
    search_bodies,
    segment,
    smaller_batch,
    wait_or_raise,
)


class AsyncClient:
    """A client of the service. Threads may share a `Client`, event loops an `AsyncClient`.

    Each process opens connections of its own, and so does each event loop of an `AsyncClient`. A
    copy, and what is pickled, has the arguments, with the key, and opens its own connections too.

    `timeout` of a method replaces that of the client [s]. Options that a newer service knows and
    this version does not are sent as they are.

    Args:
        url: Address of the service, with the path prefix of a proxy if there is one.
        index: Name or alias of the index that the methods search and describe; by default that of
            the service.
        api_key: Key of the service, if it has keys; spaces and line ends around it are ignored.
        timeout: Time of a call with all its retries [s], at most a day. The service gets it as
            the deadline.
        retries: Maximum number of retries after a broken connection, 429, 502 or 503. The wait
            is that of `Retry-After`, or grows from 0.1 s; it never exceeds the time-out.
        max_response_bytes: Most bytes of a response.
        http: An HTTP client with a pool, certificates or a proxy of your own; it is closed with
            this one, which cannot be copied, or used in a forked process or a second event loop.

    Raises:
        CareClientError: From all methods that call the service, and for a wrong argument.
    """

    def __init__(
        self,
        url: str = URL,
        *,
        index: str | None = None,
        api_key: str | None = None,
        timeout: float = 10.0,
        retries: int = 3,
        max_response_bytes: int = MAX_RESPONSE_BYTES,
        http: httpx2.AsyncClient | None = None,
    ) -> None:
        self._connection = Connection.to(url, index, api_key, timeout, retries, max_response_bytes)
        self._connections = AsyncConnections(self._connection.url, http)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_connections": copy.copy(self._connections)}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Closes all connections."""
        await self._connections.close()

    async def search(
        self, query: str, *, timeout: float | None = None, **options: Unpack[contract.SearchOptions]
    ) -> contract.SearchResponse:
        """Searches for a query. An option that is None has the service's default."""
        body = checked(contract.SEARCH_REQUEST, {**options, "query": query})
        call = Call("POST", self._connection.of_index("/search"), body, deadline=True)
        return await self._call(contract.SearchResponse, call, timeout)

    async def search_batch(
        self,
        queries: Iterable[str | Mapping[str, Any]],
        *,
        timeout: float | None = None,
        **options: Unpack[contract.SearchOptions],
    ) -> contract.BatchResponse:
        """Searches for several queries in one index version, with one request.

        A query is a text, or an object with `query` and options of its own.
        """
        body = {"queries": search_bodies(queries, options)}
        call = Call("POST", self._connection.of_index("/search/batch"), body, deadline=True)
        return await self._call(contract.BatchResponse, call, timeout)

    async def search_many(
        self,
        queries: Iterable[str | Mapping[str, Any]],
        *,
        batch: int = BATCH,
        progress: Callable[[int, int], object] | None = None,
        timeout: float | None = None,
        **options: Unpack[contract.SearchOptions],
    ) -> list[contract.SearchResponse]:
        """Searches for any number of queries, in batches that the service accepts.

        Args:
            queries: As of `search_batch`.
            batch: Queries of a request; fewer if the service has a lower limit.
            progress: Called after each batch with the queries that are done and all of them.
            timeout: Time of a batch [s].
            options: Options of all queries.

        Returns:
            One response for each query, in order. A reload in between may change the version.
        """
        number("batch", batch, Integral, 1)
        bodies = search_bodies(queries, options)
        results: list[contract.SearchResponse] = []
        while len(results) < len(bodies):
            part = bodies[len(results) : len(results) + batch]
            call = Call(
                "POST", self._connection.of_index("/search/batch"), {"queries": part}, deadline=True
            )
            try:
                response = await self._call(contract.BatchResponse, call, timeout)
            except InvalidRequestError as error:
                limit = error.errors[0].limit if error.errors else None
                if error.code != "batch_too_large" or not limit or limit >= len(part):
                    raise moved(error, len(results)) from None
                batch = limit
                continue
            results += response.results
            if progress:
                progress(len(results), len(bodies))
        return results

    async def document(self, id: str, *, timeout: float | None = None) -> contract.DocumentResponse:
        """Returns the document or chunk with an id; of a document that is split, its chunks.

        `id` is that of a hit, of its `parent`, or of any document. For an unknown one
        `InvalidRequestError` is raised, with the code `unknown_document`.
        """
        call = Call(
            "GET", self._connection.of_index(f"/documents/{segment('id', id)}"), deadline=True
        )
        answer = await self._send(call, timeout)
        found = read(contract.DocumentResponse, answer)
        found._etag = answer.headers.get("etag")
        return found

    async def documents(
        self, *, limit: int | None = None, after: str | None = None, timeout: float | None = None
    ) -> contract.DocumentsResponse:
        """Lists documents of the index, in the order of its corpus; needs an admin key.

        Args:
            limit: Most documents of the response, at most 100; by default 20.
            after: Id of the document that the list begins behind, such as `next` of the last
                response; None for the first ones.
            timeout: Time of the call [s].
        """
        path = self._connection.of_index("/documents") + parameters(limit=limit, after=after)
        return await self._call(
            contract.DocumentsResponse, Call("GET", path, deadline=True), timeout
        )

    async def put_document(
        self,
        document: Mapping[str, Any],
        *,
        if_match: str | None = None,
        only_new: bool = False,
        timeout: float | None = None,
    ) -> contract.WriteResponse:
        """Adds a document, or replaces the one with its id; an invalid one is an error.

        Args:
            document: A mapping with `_id`, `text` and optionally `title` and `metadata`.
            if_match: `etag` of the document that it replaces: if that has changed since, it is
                `InvalidRequestError` with the code `document_changed`. `*`: there must be one.
            only_new: Whether there must be no document with its id.
            timeout: Time of the call [s]. A call with a condition is not repeated.
        """
        (body,) = document_bodies([document])
        how = conditional(if_match, only_new=only_new)
        call = Call("PUT", self._connection.of_index("/documents"), body, deadline=True, **how)
        return await self._call(contract.WriteResponse, call, timeout)

    async def put_documents(
        self,
        documents: Iterable[Mapping[str, Any]],
        *,
        batch: int = DOCUMENTS,
        progress: Callable[[int, int], object] | None = None,
        timeout: float | None = None,
    ) -> contract.WriteResponse:
        """Adds documents, and replaces those with the same ids; needs a key with the role write.

        A repeated call changes nothing. Documents that break a rule are in `rejected` of the
        result, and the others are written.

        Args:
            documents: Mappings with `_id`, `text` and optionally `title` and `metadata`.
            batch: Documents of a request; fewer if the service has a lower limit.
            progress: Called after each request with the documents that are done and all of them.
            timeout: Time of a request [s].

        Returns:
            The sums of all requests, and the last version.
        """
        number("batch", batch, Integral, 1)
        call = Call("PUT", self._connection.of_index("/documents"), deadline=True)
        given = document_bodies(documents)
        return await self._write(call, given, list, batch, progress, timeout)

    async def submit_documents(
        self, documents: Iterable[Mapping[str, Any]], *, timeout: float | None = None
    ) -> contract.AcceptedResponse:
        """Does as `put_documents` with one request, but waits neither for disk nor for encoder."""
        path = self._connection.of_index("/documents") + "?wait=accepted"
        call = Call("PUT", path, document_bodies(documents), deadline=True)
        return await self._call(contract.AcceptedResponse, call, timeout)

    async def write_state(
        self, id: str, *, timeout: float | None = None
    ) -> contract.WriteStateResponse:
        """Returns what became of `submit_documents`; raises its error if it failed."""
        path = self._connection.of_index(f"/writes/{segment('id', id)}")
        call = Call("GET", path, deadline=True)
        return await self._call(contract.WriteStateResponse, call, timeout)

    async def delete_documents(
        self,
        ids: Iterable[str] | None = None,
        *,
        filter: contract.Filter | None = None,
        timeout: float | None = None,
    ) -> contract.WriteResponse:
        """Deletes the documents with these ids, or all that match a filter.

        More ids than the service takes at a time are sent in several requests, each of which has
        the `timeout` [s]. An empty list deletes nothing.
        """
        listed = [] if ids is None else [ids] if isinstance(ids, str) else list(ids)

        def body(part: Sequence[str]) -> dict[str, Any]:
            return checked(contract.DELETE_REQUEST, {"ids": part or None, "filter": filter})

        call = Call("POST", self._connection.of_index("/documents/delete"), deadline=True)
        if ids is None or filter is not None:
            one = replace(call, body=body(listed))
            return await self._call(contract.WriteResponse, one, timeout)
        return await self._write(call, listed, body, len(listed), None, timeout)

    async def delete_document(
        self, id: str, *, if_match: str | None = None, timeout: float | None = None
    ) -> contract.WriteResponse:
        """Deletes a document; without `if_match`, `missing` has the id if there is none."""
        path = self._connection.of_index(f"/documents/{segment('id', id)}")
        call = Call("DELETE", path, deadline=True, **conditional(if_match))
        return await self._call(contract.WriteResponse, call, timeout)

    async def update_metadata(
        self,
        id: str,
        metadata: Mapping[str, Any],
        *,
        if_match: str | None = None,
        timeout: float | None = None,
    ) -> contract.WriteResponse:
        """Replaces the metadata of a document, which is not encoded again."""
        path = self._connection.of_index(f"/documents/{segment('id', id)}")
        body = checked(contract.PATCH_REQUEST, {"metadata": metadata})
        call = Call("PATCH", path, body, deadline=True, **conditional(if_match))
        return await self._call(contract.WriteResponse, call, timeout)

    async def index(self, *, timeout: float | None = None) -> contract.IndexResponse:
        """Describes the index version that is served, and lists its filters."""
        call = Call("GET", self._connection.of_index("/index"))
        return await self._call(contract.IndexResponse, call, timeout)

    async def indexes(self, *, timeout: float | None = None) -> contract.IndexesResponse:
        """Lists the indexes of the service that the key may search."""
        return await self._call(contract.IndexesResponse, Call("GET", "/indexes"), timeout)

    async def create_index(
        self,
        name: str,
        *,
        like: str | None = None,
        filter_fields: Iterable[str] | None = None,
        timeout: float | None = None,
    ) -> contract.IndexResponse:
        """Creates an index without documents; needs an admin key. An equal one is left as it is.

        Args:
            name: Its name: up to 64 letters, digits, `.`, `_` and `-`.
            like: Name or alias of the index whose settings it gets; by default that of the service.
            filter_fields: Metadata fields that filters may have before any document has them.
            timeout: Time of the call [s].
        """
        fields = None if filter_fields is None else list(filter_fields)
        body = checked(contract.CREATE_REQUEST, {"like": like, "filter_fields": fields})
        call = Call("PUT", f"/indexes/{segment('name', name)}", body, deadline=True)
        return await self._call(contract.IndexResponse, call, timeout)

    async def delete_index(
        self, name: str, *, timeout: float | None = None
    ) -> contract.DeletedIndexResponse:
        """Deletes an index with all of its versions; needs an admin key."""
        call = Call("DELETE", f"/indexes/{segment('name', name)}", deadline=True)
        return await self._call(contract.DeletedIndexResponse, call, timeout)

    async def versions(self, *, timeout: float | None = None) -> contract.VersionsResponse:
        """Lists the versions of the index on disk; needs an admin key."""
        call = Call("GET", self._connection.of_index("/index/versions"))
        return await self._call(contract.VersionsResponse, call, timeout)

    async def reload(self, *, timeout: float | None = None) -> contract.IndexResponse:
        """Loads the active version; needs an admin key. The request is never repeated."""
        call = Call("POST", self._connection.of_index("/index/reload"), repeatable=False)
        return await self._call(contract.IndexResponse, call, timeout)

    async def embeddings(
        self,
        input: str | Iterable[str],
        *,
        timeout: float | None = None,
        **options: Unpack[contract.EmbeddingsOptions],
    ) -> contract.EmbeddingsResponse:
        """Encodes texts with the query encoder."""
        several = isinstance(input, Iterable) and not isinstance(input, str | bytes)
        texts = list(input) if several else input
        body = checked(contract.EMBEDDINGS_REQUEST, {**options, "input": texts})
        call = Call("POST", "/v1/embeddings", body, deadline=True)
        return await self._call(contract.EmbeddingsResponse, call, timeout)

    async def models(self, *, timeout: float | None = None) -> contract.ModelsResponse:
        """Lists the model of `embeddings`."""
        call = Call("GET", "/v1/models")
        return await self._call(contract.ModelsResponse, call, timeout)

    async def model(self, name: str, *, timeout: float | None = None) -> contract.ModelResponse:
        """Describes a model."""
        call = Call("GET", f"/v1/models/{segment('name', name)}")
        return await self._call(contract.ModelResponse, call, timeout)

    async def live(self, *, timeout: float | None = None) -> contract.Health:
        """Returns if the process runs."""
        call = Call("GET", "/health/live", repeatable=False)
        return await self._call(contract.Health, call, timeout)

    async def ready(self, *, timeout: float | None = None) -> contract.Health:
        """Returns if the service answers searches; raises `UnavailableError` at once if not."""
        call = Call("GET", "/health/ready", repeatable=False)
        return await self._call(contract.Health, call, timeout)

    async def metrics(self, *, timeout: float | None = None) -> str:
        """Returns the metrics in the text format of Prometheus."""
        answer = await self._send(Call("GET", "/metrics"), timeout)
        return answer.text()

    async def _call(self, model: type[M], call: Call, timeout: float | None) -> M:
        return read(model, await self._send(call, timeout))

    async def _write(
        self,
        call: Call,
        given: Sequence[Any],
        body: Callable[[Sequence[Any]], Any],
        batch: int,
        progress: Callable[[int, int], object] | None,
        timeout: float | None,
    ) -> contract.WriteResponse:
        """Sends what is given in requests of at most `batch`, and returns the sums."""
        done, total = 0, contract.WriteResponse()
        while done < len(given):
            part = given[done : done + batch]
            try:
                sent = replace(call, body=body(part))
                response = await self._call(contract.WriteResponse, sent, timeout)
            except InvalidRequestError as error:
                batch = smaller_batch(moved(error, done), len(part))
                continue
            total = added_up(total, response, done)
            done += len(part)
            if progress:
                progress(done, len(given))
        return total

    async def _send(self, call: Call, timeout: float | None) -> Answer:
        """Returns the response of a call with status 200 to 202, after the retries it allows."""
        request = Request.of(self._connection, call, timeout)
        retries = 0
        while True:
            reply = await self._reply(request)
            if isinstance(reply, Answer) and reply.status in (200, 201, 202) and not reply.too_long:
                return reply
            await asyncio.sleep(wait_or_raise(request, reply, retries))
            retries += 1

    async def _reply(self, request: Request) -> Reply:
        """Sends a request once; an error is returned, so that none is chained to it."""
        try:
            http = self._connections.http()
            async with (
                async_until(request.end),
                http.stream(
                    request.call.method,
                    request.url,
                    headers=request.headers,
                    content=request.content,
                    timeout=request.timeout,
                ) as response,
            ):
                answer = Answer(response.status_code, response.headers, request)
                whole = response.is_stream_consumed  # as the caller's transport can return it
                async for chunk in response.aiter_bytes() if whole else response.aiter_raw():
                    if not answer.add(chunk):
                        break
                return answer
        except Exception as error:
            return error
