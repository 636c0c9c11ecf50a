"""Checks of what a service needs: settings, pair, index, stores, Redis, its port."""

import asyncio
import json
import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

from care.diagnosis.finding import Finding
from care.options import vector_stores
from core.breaker import Breaker
from core.encoders import Encoder
from core.errors import CareError
from core.manifest import SCHEMA_VERSION
from core.types import FloatArray
from core.versions import IndexFolder, schema_of
from models.encoders.tokenizer import verified_file
from models.pairs import load_pair
from search.snapshot import load_index
from service.access.api_keys import ApiKeys
from service.access.guards import token_key_file
from service.access.key_file import KeyFile
from service.app import load_query_encoder, make_reranker
from service.settings import Settings, ignored_port, plain, read_settings
from service.workers.supervisor import choose_workers
from stores.faiss.gpu import check_device, gpus

# Longest wait for a server that is checked [s].
_TIMEOUT = 3.0
# Most bytes of a response of what holds the port.
_MOST_BYTES = 4096


def check_serving(*, index_required: bool) -> Iterator[Finding]:
    """Checks what `care serve` needs, with the settings of the environment.

    A missing index is an error only if it is required: a new installation has none.
    """
    try:
        settings = read_settings()
        if settings.api_keys_file:
            KeyFile(settings.api_keys_file, settings.index)
        else:
            ApiKeys.parse(plain(settings.api_keys), settings.index)
        if settings.token_keys:
            token_key_file(settings, settings.token_keys)
    except CareError as error:
        yield Finding.of("settings", error)
        return
    if warning := ignored_port():
        yield Finding("settings", "warning", warning)
    else:
        yield Finding("settings", "ok", "all CARE_* variables are known and valid")
    workers, reason = choose_workers(settings)
    yield Finding("workers", "ok", f"{workers}: {reason}")
    encoder, finding = check_pair(settings)
    yield finding
    if settings.faiss_device != "cpu":
        yield check_faiss(settings)
    if settings.milvus_uri:
        yield check_milvus(settings)
    if encoder:
        yield check_index(settings, encoder, required=index_required)
    if settings.redis_url:
        yield check_redis(settings)
    if settings.rerank_url:
        yield check_reranker(settings)
    yield check_port(settings)


def check_pair(settings: Settings) -> tuple[Encoder | None, Finding]:
    """Loads the query encoder as the service does, and verifies the document encoder's files."""
    try:
        pair = load_pair(settings.pair, settings.pairs)
        encoder = load_query_encoder(settings)
        if pair.document.format == "onnx":
            spec = pair.document
            verified_file(spec, pair.folder / spec.weights, spec.weights_sha256)
            verified_file(spec, pair.folder / spec.tokenizer, spec.tokenizer_sha256)
    except CareError as error:
        return None, Finding.of("pair", error)
    found = f"{pair.name}: queries by {pair.query.model}, documents by {pair.document.model}"
    return encoder, Finding("pair", "ok", f"{found}; files match their checksums")


def check_index(settings: Settings, encoder: Encoder, *, required: bool) -> Finding:
    """Opens the active version as the service does: files, checksums, canaries, vectors."""
    root, name = settings.indexes, settings.index
    stores = vector_stores(plain(settings.milvus_uri))
    try:
        index = IndexFolder(root, name)
        in_milvus = settings.store == "milvus"
        active = stores.get("milvus").active_version(index) if in_milvus else index.active()
        folder = index.version(active)
    except CareError as error:
        if required or error.code != "no_active_version":
            return Finding.of("index", error)
        return Finding("index", "warning", f"{error} [{error.code}]")
    try:
        overflow = settings.overflow_pair
        others = [load_query_encoder(settings, overflow)] if overflow else []
        snapshot = load_index(index, encoder, stores.for_version(folder), others)
        schema = schema_of(folder)
    except CareError as error:
        return Finding.of("index", error)
    manifest = snapshot.manifest
    found = (
        f"{name} {manifest.version}: {manifest.corpus.documents:,} documents, {manifest.factory}"
    )
    if schema != SCHEMA_VERSION:
        advice = f"Rewrite its manifest: care versions migrate --index {name}."
        return Finding("index", "warning", f"{found}; manifest of schema {schema}", advice)
    return Finding("index", "ok", f"{found}; checksums and embedding space match")


def check_faiss(settings: Settings) -> Finding:
    """Checks that FAISS can search on the configured device."""
    try:
        check_device(settings.faiss_device)
    except CareError as error:
        return Finding.of("faiss", error)
    return Finding("faiss", "ok", f"{gpus()} GPUs; the first one searches")


def check_milvus(settings: Settings) -> Finding:
    """Connects to Milvus."""
    try:
        vector_stores(plain(settings.milvus_uri)).get("milvus")
    except CareError as error:
        return Finding.of("milvus", error)
    return Finding("milvus", "ok", "connected")


def check_redis(settings: Settings) -> Finding:
    """Sends PING to Redis."""
    from redis import RedisError
    from redis.asyncio import Redis

    url = plain(settings.redis_url)
    # Without user and password.
    parts = urlsplit(url)
    place = f"{parts.hostname or parts.path}:{parts.port or 6379}"

    async def ping() -> None:
        # What listens is unknown: the time of the whole exchange is limited.
        async with asyncio.timeout(_TIMEOUT), Redis.from_url(url) as client:
            await client.ping()

    try:
        asyncio.run(ping())
    except (RedisError, OSError, ValueError) as error:
        advice = (
            "Start it, or correct CARE_REDIS_URL; without Redis the service serves, but replicas "
            "share no cache and no rate limit."
        )
        return Finding("redis", "error", f"{place}: {type(error).__name__}", advice)
    return Finding("redis", "ok", f"{place} responds")


def check_reranker(settings: Settings) -> Finding:
    """Lets the server of `CARE_RERANK_URL` rank two texts."""
    breaker = Breaker()

    async def scores() -> FloatArray:
        server = make_reranker(settings, breaker)
        try:
            return await server.scores("高血压饮食", ["少吃盐。", "孩子发热。"])
        finally:
            await server.close()

    try:
        asyncio.run(scores())
    except CareError as error:
        advice = "Start it, or correct CARE_RERANK_URL; without it hits are not ranked again."
        return Finding("reranker", "error", f"{error}", advice)
    return Finding("reranker", "ok", "ranks texts")


def check_port(settings: Settings) -> Finding:
    """Checks whether the address of the service is free, or held by a service of this project."""
    host, port = settings.host, settings.port
    place = f"{host}:{port}"
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen()
            return Finding("port", "ok", f"{place} is free")
        except OSError as error:
            reason = error.strerror
    if _is_service(host, port):
        return Finding("port", "ok", f"{place} is held by a running care service")
    advice = "Set CARE_PORT to another port, or CARE_HOST to an address of this machine."
    return Finding("port", "error", f"{place} cannot be used: {reason}", advice)


def _is_service(host: str, port: int) -> bool:
    local = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)

    async def answer() -> bytes:
        # What listens is unknown: time and size are limited.
        async with asyncio.timeout(_TIMEOUT):
            reader, writer = await asyncio.open_connection(local, port)
            try:
                writer.write(
                    b"GET /health/live HTTP/1.1\r\nHost: care\r\nConnection: close\r\n\r\n"
                )
                return await reader.readexactly(_MOST_BYTES)
            except asyncio.IncompleteReadError as end:
                return end.partial
            finally:
                writer.close()

    try:
        head, _, body = asyncio.run(answer()).partition(b"\r\n\r\n")
        return head.split()[1:2] == [b"200"] and bool(json.loads(body) == {"status": "live"})
    except (OSError, ValueError):
        return False
