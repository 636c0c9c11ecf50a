"""The route of answers, for the search page: a language model writes them from the first hits.

It is off unless `CARE_CHAT_URL` names a server. It is a part of the page, not of the documented
contract.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from fastapi import Depends, Request
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.responses import Response, StreamingResponse

from core.breaker import UnavailableError
from search.answerable import is_unanswered
from service import schemas
from service.access.guards import (
    ENCODING_ERRORS,
    RequireRole,
    Timeout,
    admitted,
    charge_rate,
    client_of,
    get_state,
    opened_index,
    problem_responses,
    visible_to,
)
from service.pipeline.answering import Passage, Sentences, checked, messages
from service.routes.answers import size_of_hits
from service.routes.direct_route import routes_for
from service.routes.search import both

if TYPE_CHECKING:
    from service.pipeline.chat_server import ChatServer

# Most hits that the model gets, and most characters of each.
_PASSAGES, _CHARS = 5, 2000

answer_routes = routes_for(Depends(RequireRole("search")), tags=["search"])


@answer_routes.get("/answer/server", include_in_schema=False, responses=problem_responses(401, 403))
async def answer_server(request: Request) -> Any:
    """Returns which server gets questions and passages, null if none does."""
    chat = get_state(request).chat
    return {"server": chat.host if chat else None}


@both(answer_routes, "POST", "/answer", 404, *ENCODING_ERRORS, include_in_schema=False)
async def answer(
    request: Request, body: schemas.SearchRequest, timeout_ms: Timeout = None
) -> Response:
    """Streams an answer to a query as server-sent events.

    - `passages`: the ids and titles of the hits that the model gets, in the order of citations.
    - `sentence`: its text, and the numbers of the passages that it cites.
    - `refusal`: why there is no answer: no_hits, unanswered, or not_cited if no sentence of the
      model holds. The model is not asked in the first two cases.
    - `error`: the answer was broken off.
    - `end`: the last event, with the number of sentences that were left out.
    """
    state = get_state(request)
    if state.chat is None:
        raise HTTPException(404)
    await charge_rate(request, 1)
    opened = await opened_index(request, timeout_ms)
    engine = opened.engine
    query = body.model_copy(update={"top_k": min(body.top_k, _PASSAGES)}).as_query()
    within, client = visible_to(request), client_of(request.scope)
    search = await engine.checked(opened.snapshot, [query], within, batch=False, client=client)
    size = size_of_hits(search.index, search.queries[0].top_k)
    with admitted(request, timeout_ms, size) as deadline:
        ((result, _),) = await engine.search(search, deadline)
    hits = list(result.hits)
    request.scope["state"]["hits"] = len(hits)
    refusal = ""
    if not hits:
        refusal = "no_hits"
    elif is_unanswered(search.index.judges, search.queries[0].mode, result.how["answerable"]):
        refusal = "unanswered"
    passages = [Passage(hit.title, hit.text[:_CHARS]) for hit in hits]
    named = [{"id": hit.id, "title": hit.title} for hit in hits]
    events = _events(state.chat, query.text, passages, named, refusal)
    headers = {"X-Accel-Buffering": "no"}  # nginx passes events on as they come
    return StreamingResponse(events, headers=headers, media_type="text/event-stream")


async def _events(
    chat: "ChatServer",
    question: str,
    passages: Sequence[Passage],
    named: Sequence[dict[str, str]],
    refusal: str,
) -> AsyncGenerator[bytes, None]:
    if refusal:
        yield _event("refusal", {"reason": refusal})
        yield _event("end", {"left_out": 0})
        return
    yield _event("passages", {"passages": named})
    sentences = Sentences()
    held = left_out = 0

    def check(texts: Any) -> list[bytes]:
        nonlocal held, left_out
        events = []
        for text in texts:
            if not text.strip():
                continue
            if found := checked(text, passages):
                held += 1
                events.append(
                    _event("sentence", {"text": found.text, "citations": found.citations})
                )
            else:
                left_out += 1
        return events

    try:
        async with aclosing(chat.answer(messages(question, passages))) as pieces:
            async for piece in pieces:
                for event in check(sentences.add(piece)):
                    yield event
        for event in check(sentences.end()):
            yield event
    except UnavailableError:
        yield _event("error", {"code": UnavailableError.default_code})
    else:
        if not held:
            yield _event("refusal", {"reason": "not_cited"})
    yield _event("end", {"left_out": left_out})


def _event(name: str, data: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), to_json(data))
