"""The two clients: each route is written once, as a plan that both of them run."""

import asyncio
import copy
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from functools import update_wrapper
from numbers import Integral
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar, cast, overload
from urllib.parse import quote

import httpx2
from typing_extensions import Unpack

from care_client import models as contract
from care_client.connections import Connections, async_http, sync_http, until
from care_client.errors import InvalidRequestError, invalid
from care_client.exchange import (
    Answer,
    Call,
    Connection,
    Plan,
    Reply,
    Step,
    Wait,
    checked,
    number,
    read,
)

P = ParamSpec("P")
T = TypeVar("T")

URL = "http://127.0.0.1:8000"
# The default of CARE_MAX_BATCH; a service with a lower limit names it in its error.
_BATCH = 64
MAX_RESPONSE_BYTES = 64 * 2**20


class _Route(Generic[P, T]):
    """A method of both clients: it returns a value of `Client`, a coroutine of `AsyncClient`."""

    def __init__(self, plan: Callable[Concatenate[Any, P], Plan[T]]) -> None:
        self._plan = plan
        update_wrapper(cast(Any, self), plan)

    @overload
    def __get__(self, client: "Client", owner: Any = None) -> Callable[P, T]: ...
    @overload
    def __get__(
        self, client: "AsyncClient", owner: Any = None
    ) -> Callable[P, Coroutine[Any, Any, T]]: ...
    @overload
    def __get__(self, client: None, owner: Any = None) -> Self: ...
    def __get__(self, client: Any, owner: Any = None) -> Any:
        if client is None:
            return self

        def method(*args: P.args, **kwargs: P.kwargs) -> Any:
            return client._run(self._plan(client, *args, **kwargs))

        return update_wrapper(method, self._plan)


class _Routes:
    """The routes of the service.

    `timeout` of a method replaces that of the client [s]. Options that a newer service knows and
    this version does not are sent as they are.
    """

    _connection: Connection
    _connections: Connections[Any]

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_connections": copy.copy(self._connections)}

    @_Route
    def search(
        self, query: str, *, timeout: float | None = None, **options: Unpack[contract.SearchOptions]
    ) -> Plan[contract.SearchResponse]:
        """Searches for a query. An option that is None has the service's default."""
        body = checked(contract.SEARCH_REQUEST, {**options, "query": query})
        call = Call("POST", "/search", body, deadline=True)
        return read(contract.SearchResponse, (yield from self._connection.exchange(call, timeout)))

    @_Route
    def search_batch(
        self,
        queries: Iterable[str | Mapping[str, Any]],
        *,
        timeout: float | None = None,
        **options: Unpack[contract.SearchOptions],
    ) -> Plan[contract.BatchResponse]:
        """Searches for several queries in one index version, with one request.

        A query is a text, or an object with `query` and options of its own.
        """
        body = {"queries": _bodies(queries, options)}
        call = Call("POST", "/search/batch", body, deadline=True)
        return read(contract.BatchResponse, (yield from self._connection.exchange(call, timeout)))

    @_Route
    def search_many(
        self,
        queries: Iterable[str | Mapping[str, Any]],
        *,
        batch: int = _BATCH,
        progress: Callable[[int, int], object] | None = None,
        timeout: float | None = None,
        **options: Unpack[contract.SearchOptions],
    ) -> Plan[list[contract.SearchResponse]]:
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
        bodies = _bodies(queries, options)
        results: list[contract.SearchResponse] = []
        while len(results) < len(bodies):
            part = bodies[len(results) : len(results) + batch]
            call = Call("POST", "/search/batch", {"queries": part}, deadline=True)
            try:
                response = yield from self._connection.exchange(call, timeout)
            except InvalidRequestError as error:
                limit = error.errors[0].limit if error.errors else None
                if error.code != "batch_too_large" or not limit or limit >= len(part):
                    raise
                batch = limit
                continue
            results += read(contract.BatchResponse, response).results
            if progress:
                progress(len(results), len(bodies))
        return results

    @_Route
    def document(self, id: str, *, timeout: float | None = None) -> Plan[contract.DocumentResponse]:
        """Returns the document or chunk with an id; of a document that is split, its chunks.

        `id` is that of a hit, of its `parent`, or of any document. For an unknown one
        `InvalidRequestError` is raised, with the code `unknown_document`.
        """
        call = Call("GET", f"/documents/{_segment('id', id)}", deadline=True)
        response = yield from self._connection.exchange(call, timeout)
        return read(contract.DocumentResponse, response)

    @_Route
    def index(self, *, timeout: float | None = None) -> Plan[contract.IndexResponse]:
        """Describes the index version that is served, and lists its filters."""
        call = Call("GET", "/index")
        return read(contract.IndexResponse, (yield from self._connection.exchange(call, timeout)))

    @_Route
    def reload(self, *, timeout: float | None = None) -> Plan[contract.IndexResponse]:
        """Loads the active version; needs an admin key. The request is never repeated."""
        call = Call("POST", "/index/reload", repeatable=False)
        return read(contract.IndexResponse, (yield from self._connection.exchange(call, timeout)))

    @_Route
    def embeddings(
        self,
        input: str | Iterable[str],
        *,
        timeout: float | None = None,
        **options: Unpack[contract.EmbeddingsOptions],
    ) -> Plan[contract.EmbeddingsResponse]:
        """Encodes texts with the query encoder."""
        several = isinstance(input, Iterable) and not isinstance(input, str | bytes)
        texts = list(input) if several else input
        body = checked(contract.EMBEDDINGS_REQUEST, {**options, "input": texts})
        call = Call("POST", "/v1/embeddings", body, deadline=True)
        response = yield from self._connection.exchange(call, timeout)
        return read(contract.EmbeddingsResponse, response)

    @_Route
    def models(self, *, timeout: float | None = None) -> Plan[contract.ModelsResponse]:
        """Lists the model of `embeddings`."""
        call = Call("GET", "/v1/models")
        return read(contract.ModelsResponse, (yield from self._connection.exchange(call, timeout)))

    @_Route
    def model(self, name: str, *, timeout: float | None = None) -> Plan[contract.ModelResponse]:
        """Describes a model."""
        call = Call("GET", f"/v1/models/{_segment('name', name)}")
        return read(contract.ModelResponse, (yield from self._connection.exchange(call, timeout)))

    @_Route
    def live(self, *, timeout: float | None = None) -> Plan[contract.Health]:
        """Returns if the process runs."""
        call = Call("GET", "/health/live", repeatable=False)
        return read(contract.Health, (yield from self._connection.exchange(call, timeout)))

    @_Route
    def ready(self, *, timeout: float | None = None) -> Plan[contract.Health]:
        """Returns if the service answers searches; raises `UnavailableError` at once if not."""
        call = Call("GET", "/health/ready", repeatable=False)
        return read(contract.Health, (yield from self._connection.exchange(call, timeout)))

    @_Route
    def metrics(self, *, timeout: float | None = None) -> Plan[str]:
        """Returns the metrics in the text format of Prometheus."""
        return (yield from self._connection.exchange(Call("GET", "/metrics"), timeout)).text()


class Client(_Routes):
    """A client with a pool of connections; threads may share it.

    A forked process opens connections of its own. A copy, and what is pickled, has the arguments,
    with the key, and opens its own connections too.

    Args:
        url: Address of the service, with the path prefix of a proxy if there is one.
        api_key: Key of the service, if it has keys; spaces and line ends around it are ignored.
        timeout: Time of a call with all its retries [s], at most a day. The service gets it as
            the deadline.
        retries: Maximum number of retries after a broken connection, 429, 502 or 503. The wait
            is that of `Retry-After`, or grows from 0.1 s; it never exceeds the time-out.
        max_response_bytes: Most bytes of a response.
        http: An HTTP client with a pool, certificates or a proxy of your own; it is closed with
            this one, which cannot be copied or used in a forked process.

    Raises:
        CareClientError: From all methods that call the service, and for a wrong argument.
    """

    def __init__(
        self,
        url: str = URL,
        *,
        api_key: str | None = None,
        timeout: float = 10.0,
        retries: int = 3,
        max_response_bytes: int = MAX_RESPONSE_BYTES,
        http: httpx2.Client | None = None,
    ) -> None:
        self._connection = Connection.to(url, api_key, timeout, retries, max_response_bytes)
        self._connections = Connections(sync_http, self._connection.url, http)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes all connections."""
        for _, http in self._connections.close():
            http.close()

    def _run(self, plan: Plan[T]) -> T:
        reply: Reply = None
        while True:
            try:
                reply = self._take(plan.send(reply))
            except StopIteration as end:
                return cast(T, end.value)

    def _take(self, step: Step) -> Reply:
        if isinstance(step, Wait):
            time.sleep(step.seconds)
            return None
        try:
            http = self._connections.of()
            with (
                until(step.end),
                http.stream(
                    step.method,
                    step.url,
                    headers=step.headers,
                    content=step.content,
                    timeout=step.timeout,
                ) as response,
            ):
                answer = Answer(response.status_code, response.headers, step)
                whole = response.is_stream_consumed  # as the caller's transport can return it
                for chunk in response.iter_bytes() if whole else response.iter_raw():
                    if not answer.add(chunk):
                        break
                return answer
        except Exception as error:
            return error


class AsyncClient(_Routes):
    """`Client` with coroutines; event loops may share it, each has connections of its own.

    `http` is an `httpx2.AsyncClient`; a client that has it belongs to the loop of its first call.
    """

    def __init__(
        self,
        url: str = URL,
        *,
        api_key: str | None = None,
        timeout: float = 10.0,
        retries: int = 3,
        max_response_bytes: int = MAX_RESPONSE_BYTES,
        http: httpx2.AsyncClient | None = None,
    ) -> None:
        self._connection = Connection.to(url, api_key, timeout, retries, max_response_bytes)
        self._connections = Connections(async_http, self._connection.url, http)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Closes all connections."""
        here = asyncio.get_running_loop()
        for loop, http in self._connections.close():
            if loop in (here, None):
                await http.aclose()
            elif loop.is_running():
                asyncio.run_coroutine_threadsafe(http.aclose(), loop)

    async def _run(self, plan: Plan[T]) -> T:
        reply: Reply = None
        while True:
            try:
                step = plan.send(reply)
            except StopIteration as end:
                return cast(T, end.value)
            reply = await self._take(step)

    async def _take(self, step: Step) -> Reply:
        if isinstance(step, Wait):
            await asyncio.sleep(step.seconds)
            return None
        try:
            http = self._connections.of(asyncio.get_running_loop())
            async with (
                asyncio.timeout(step.timeout),
                http.stream(
                    step.method,
                    step.url,
                    headers=step.headers,
                    content=step.content,
                    timeout=step.timeout,
                ) as response,
            ):
                answer = Answer(response.status_code, response.headers, step)
                whole = response.is_stream_consumed
                async for chunk in response.aiter_bytes() if whole else response.aiter_raw():
                    if not answer.add(chunk):
                        break
                return answer
        except Exception as error:
            return error


def _segment(name: str, text: str) -> str:
    """Returns the text of an argument as one segment of a path."""
    if not isinstance(text, str):
        raise invalid(name, "is no text")
    # httpx2 would resolve the segments "." and "..". No stored text has an unpaired surrogate.
    return quote(text, safe="", errors="surrogatepass").replace(".", "%2E")


def _bodies(
    queries: Iterable[str | Mapping[str, Any]], options: Mapping[str, Any]
) -> list[dict[str, Any]]:
    if isinstance(queries, str | bytes | Mapping) or not isinstance(queries, Iterable):
        raise invalid("queries", "is no list of queries")
    return [
        checked(
            contract.SEARCH_REQUEST,
            {**options, **(query if isinstance(query, Mapping) else {"query": query})},
        )
        for query in queries
    ]
