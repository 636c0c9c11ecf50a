"""Reading the JSON body of a request in bounded time: its size, its values, its faults."""

import asyncio
from codecs import BOM_UTF8
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json
from starlette.requests import ClientDisconnect
from starlette.types import Receive

from core.errors import QueryError
from service.errors import RequestError
from service.schemas import FieldError
from service.settings import Settings

_JSON, _NDJSON = "application/json", "application/x-ndjson"
# Names in the path of a field are cut to this many characters.
_MAX_NAME = 64
# Longer bodies are parsed in steps, and the event loop handles other requests in between [bytes].
_LONG = 1 << 16


async def read_body(receive: Receive) -> bytearray:
    """Returns the body; ClientDisconnect if the client leaves, RequestError if too long or late."""
    body = bytearray()
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return body


async def parse_body(
    type_: TypeAdapter[Any], content_type: str | None, body: bytearray, settings: Settings
) -> Any:
    """Returns the value of a JSON body, which must be of the type `type_`.

    No step takes the event loop more than some 30 ms for a body of 4 MiB: values are counted before
    they become objects, and the validation of a list stops at its first fault. Without a header
    Content-Type the body is taken for JSON. RequestError if it has another media type, is not valid
    JSON, has too many values, or is not of the type.
    """
    if _media_type(content_type or _JSON) != _JSON:
        raise RequestError("unsupported_media_type", f"the Content-Type is not {_JSON}")
    await _check_size(body, settings.max_values, settings.max_names)
    value = _parsed(body)
    await _pause(body)
    return validated(type_, value, context=settings)


def is_lines(content_type: str | None) -> bool:
    """Returns whether a header Content-Type is that of lines of JSON."""
    return _media_type(content_type or "") == _NDJSON


async def parse_documents(
    content_type: str | None, body: bytearray, settings: Settings
) -> tuple[list[dict[str, Any]], bool]:
    """Returns the documents of a body, and whether it is one document instead of a list.

    A body of the type application/x-ndjson has one in each line that is not empty. Long bodies are
    parsed in a thread. RequestError if the header Content-Type is missing or another one, a
    document is no JSON object, or there is no document; QueryError if there are too many.
    """
    media_type = _media_type(content_type or "")
    if media_type not in (_JSON, _NDJSON):
        message = f"the Content-Type is neither {_JSON} nor {_NDJSON}"
        raise RequestError("unsupported_media_type", message)
    # A document has up to 100 fields of metadata, most of them one value.
    most = settings.max_documents * 256
    await _check_size(body, most, most)
    parse = _parsed if media_type == _JSON else _lines
    value = await asyncio.to_thread(parse, body) if len(body) > _LONG else parse(body)
    documents = value if isinstance(value, list) else [value]
    if not documents:
        raise invalid([{"type": "missing", "loc": (), "msg": "has no document"}])
    if (number := len(documents)) > (limit := settings.max_documents):
        message = f"has {number} documents; the limit is {limit} (CARE_MAX_DOCUMENTS)"
        raise QueryError("body", message, code="batch_too_large", limit=limit)
    for position, document in enumerate(documents):
        if not isinstance(document, dict):
            place = (position,) if isinstance(value, list) else ()
            raise invalid([{"type": "model_type", "loc": place, "msg": ""}])
    return documents, not isinstance(value, list)


def _lines(body: bytearray) -> list[Any]:
    """Returns the values of the lines of a body that are not empty."""
    lines = ((number, line) for number, line in enumerate(body.split(b"\n"), 1) if line.strip())
    return [_parsed(line, "line", str(number)) for number, line in lines]


def _media_type(content_type: str) -> str:
    return content_type.partition(";")[0].strip().lower()


async def _check_size(body: bytearray, values: int, names: int) -> None:
    """Checks that a JSON text has something, and not too much, before it is parsed."""
    if body.startswith(BOM_UTF8):
        del body[: len(BOM_UTF8)]
    if not body:
        raise invalid([{"type": "missing", "loc": (), "msg": "Field required"}])
    if len(body) > names:
        if await has_more(body, values, names):
            message = f"the request body has more than {values} values or {names} names of fields"
            raise RequestError("body_too_long", message, limit=values)
        await _pause(body)


def parse_line(text: bytes, values: int) -> dict[str, Any] | str:
    """Returns the JSON object in a line, or why there is none; it may have so many values."""
    if _separators(text) > values:
        return f"the line has more than {values} values"
    try:
        value = from_json(text, cache_strings="none")
    except ValueError:
        return "the line is not valid JSON"
    return value if isinstance(value, dict) else "the line is not a JSON object"


def _parsed(text: bytearray, *place: str) -> Any:
    """Returns the value of a JSON text; the RequestError of one that is not valid has a place."""
    try:
        return from_json(text, cache_strings="none")
    except ValueError as error:
        fault = {"type": "invalid_json", "loc": place, "msg": "is not valid JSON"}
        raise invalid([fault], code="invalid_json") from error


async def has_more(body: bytearray, values: int, names: int) -> bool:
    """Returns whether a JSON text has more values or names of fields, without parsing it.

    Commas and opening brackets outside of strings are counted as values: a text has at most one
    value more; fewer only if it has empty lists or objects, which count twice. Colons outside of
    strings are counted as names.
    """
    if _separators(body) <= values and body.count(b":") <= names:
        return False
    # Without escaped quotes, every second part between quotes is outside of strings.
    plain = body.replace(rb"\\", b"")
    await _pause(body)
    plain = plain.replace(rb"\"", b"")
    found_values, found_names, in_string = 0, 0, False
    for start in range(0, len(plain), _LONG):
        await _pause(body)
        parts = plain[start : start + _LONG].split(b'"')
        outside = b"".join(parts[in_string::2])
        found_values += _separators(outside)
        found_names += outside.count(b":")
        if found_values > values or found_names > names:
            return True
        in_string ^= len(parts) % 2 == 0
    return False


def validated(
    type_: TypeAdapter[Any], value: Any, *place: str, context: Settings | None = None
) -> Any:
    """Returns the value of a type; raises `RequestError` with its faults, at `place`."""
    try:
        return type_.validate_python(value, context=context)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False, include_input=False)
        raise invalid(found, *place) from None


def invalid(
    found: Sequence[Mapping[str, Any]], *place: str, code: str = "invalid_request"
) -> RequestError:
    """Returns an error that names the invalid fields, without their values: one may be a query."""
    errors = []
    for fault in found:
        field = ".".join(str(part)[:_MAX_NAME] for part in (*place, *fault["loc"])) or "body"
        # Pydantic's message names the class.
        message = "is not a JSON object" if fault["type"] == "model_type" else fault["msg"]
        errors.append(FieldError(field=field, code=fault["type"], message=message))
    return RequestError(code, f"{errors[0].field}: {errors[0].message}", errors)


def _separators(text: bytes | bytearray) -> int:
    return text.count(b",") + text.count(b"[") + text.count(b"{")


async def _pause(body: bytearray) -> None:
    if len(body) > _LONG:
        await asyncio.sleep(0)
