"""The routes that OpenAI's clients call: embeddings of queries, and the name of the model."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Annotated, Any

from fastapi import Depends, Path, Request

from core.errors import QueryError
from core.vectors import truncate_normalize
from search.query import check_text
from service import schemas
from service.access.guards import (
    ENCODING_ERRORS,
    RequireRole,
    State,
    Timeout,
    admitted,
    charge_rate,
    client_of,
    get_state,
    problem_responses,
)
from service.errors import RequestError
from service.limits import Client
from service.routes.answers import embeddings_json, sent_in_parts
from service.routes.direct_route import routes_for

# Texts that are checked before the event loop handles other requests.
_STEP = 16
# Numbers of an answer that is made on the event loop: 4 ms.
_SHORT = 8192
# Size of a number as JSON [bytes].
_NUMBER_BYTES = 20

# Vectors of texts say nothing of an index.
_role = RequireRole("search", anywhere=True)
openai_routes = routes_for(Depends(_role), prefix="/v1", tags=["OpenAI"])


@openai_routes.post(
    "/embeddings",
    response_model=schemas.EmbeddingsResponse,
    responses=problem_responses(*ENCODING_ERRORS, model=schemas.OpenAIProblem),
)
async def embeddings(
    request: Request, body: schemas.EmbeddingsRequest, timeout_ms: Timeout = None
) -> Any:
    """Encodes texts with the query encoder; the interface is OpenAI's.

    Long lists are encoded in parts, and other requests are served in between. Without
    X-Request-Timeout-Ms a request has CARE_TIMEOUT_MS for each CARE_MAX_BATCH texts.
    `input_type` `document` is an error, because documents are encoded offline. Arrays of token
    ids are errors too.
    """
    state = get_state(request)
    dimension = state.catalog.served.index.manifest.encoder.dimension
    _check(body, state, dimension)
    texts = []
    for i, text in enumerate([body.input] if isinstance(body.input, str) else body.input):
        field = "input" if isinstance(body.input, str) else f"input.{i}"
        texts.append(check_text(text, state.settings.max_query_chars, field))
        if i % _STEP == _STEP - 1:
            await asyncio.sleep(0)
    batches = -(-len(texts) // state.settings.max_batch)
    timeout_ms = timeout_ms or state.settings.timeout_ms * batches
    return _embeddings(request, body, texts, timeout_ms)


async def _embeddings(
    request: Request, body: schemas.EmbeddingsRequest, texts: list[str], timeout_ms: int
) -> AsyncGenerator[bytes, None]:
    """Yields the JSON of the response in parts; a short one is a single part."""
    state = get_state(request)
    engine = state.engine
    most = state.catalog.served.index.manifest.encoder.dimension
    dimension = body.dimensions or most
    size = _NUMBER_BYTES * dimension * len(texts)
    await charge_rate(request, len(texts))
    with admitted(request, timeout_ms, size) as deadline:
        asking = Client(client_of(request.scope), state.catalog.default_name)
        vectors, tokens = await engine.embed(texts, deadline, asking)
        in_base64 = body.encoding_format == "base64"
        if len(texts) * most <= _SHORT:
            vectors = truncate_normalize(vectors, dimension)
            yield b"".join(embeddings_json(vectors, state.pair, tokens, in_base64=in_base64))
        else:
            vectors = await engine.run(truncate_normalize, vectors, dimension)
            pieces = embeddings_json(vectors, state.pair, tokens, in_base64=in_base64)
            async for part in sent_in_parts(pieces, engine.run):
                yield part


@openai_routes.get(
    "/models",
    response_model=schemas.ModelsResponse,
    responses=problem_responses(401, 403, 503, model=schemas.OpenAIProblem),
)
async def models(request: Request) -> Any:
    """Lists the model of `/v1/embeddings`; the interface is OpenAI's."""
    return {"object": "list", "data": [_model(get_state(request))]}


@openai_routes.get(
    "/models/{model}",
    response_model=schemas.ModelResponse,
    responses=problem_responses(401, 403, 404, 422, 503, model=schemas.OpenAIProblem),
)
async def model(
    request: Request, model: Annotated[str, Path(description="Name of the pair.")]
) -> Any:
    """Describes the model of `/v1/embeddings`; the interface is OpenAI's."""
    state = get_state(request)
    if model != state.pair:
        message = f"the model does not exist; this service has '{state.pair}'"
        raise RequestError("model_not_found", message, model=state.pair)
    return _model(state)


def _model(state: State) -> dict[str, Any]:
    created = int(state.catalog.served.index.manifest.created_at.timestamp())
    return {"id": state.pair, "object": "model", "created": created, "owned_by": "care"}


def _check(body: schemas.EmbeddingsRequest, state: State, dimension: int) -> None:
    """Checks all fields but the texts themselves; raises `QueryError`."""
    limit = state.settings.max_embeddings
    if not isinstance(body.input, str) and len(body.input) > limit:
        message = f"contains {len(body.input)} texts; the limit is {limit} (CARE_MAX_EMBEDDINGS)"
        raise QueryError("input", message, code="batch_too_large", limit=limit)
    if body.input_type == "document":
        message = (
            "is 'document', but the service loads the query encoder only: encode documents with "
            f"'care index', or in Python with care.load_pair('{state.pair}').encode_documents()"
        )
        raise QueryError("input_type", message, code="document_encoder_not_loaded")
    if body.model not in (None, state.pair):
        message = f"is unknown; this service has '{state.pair}'"
        raise QueryError("model", message, code="unknown_model", model=state.pair)
    if body.dimensions and body.dimensions > dimension:
        message = f"is {body.dimensions}; the encoder has {dimension} dimensions"
        raise QueryError("dimensions", message, code="too_many_dimensions", limit=dimension)
