"""Bodies of requests in a content coding (RFC 9110, 8.4): gzip and deflate."""

import asyncio
import zlib

from starlette.types import Message, Receive, Scope

from service.errors import RequestError

# Longest part that is decoded at once, in some 0.2 ms [bytes].
_PART = 1 << 16
_SUPPORTED = (["gzip"], ["x-gzip"], ["deflate"])


def decoded(scope: Scope, receive: Receive, limit: int) -> Receive:
    """Returns what receives the body of a request without its content coding.

    It arrives in parts of at most 64 KiB, so the caller can stop a body that decodes to many bytes.
    Receiving raises `RequestError` if the coding is not supported, the body is damaged, or it has
    more than `limit` bytes before it is decoded.
    """
    values = [str(v, "latin-1") for name, v in scope["headers"] if name == b"content-encoding"]
    if not values:
        return receive
    codings = [coding.strip() for coding in ",".join(values).lower().split(",")]
    codings = [coding for coding in codings if coding not in ("", "identity")]
    return _Decoder(codings, receive, limit).receive if codings else receive


class _Decoder:
    def __init__(self, codings: list[str], receive: Receive, limit: int) -> None:
        self._codings = codings
        self._receive = receive
        self._limit = limit
        self._received = 0
        self._coded = b""  # what is not decoded yet
        self._pending = False  # more can be decoded before more arrives
        self._arrived = False  # the whole body
        self._stream: zlib._Decompress | None = None

    async def receive(self) -> Message:
        if self._codings not in _SUPPORTED:
            supported = "send the body as it is or in one of the codings gzip and deflate"
            raise RequestError("unsupported_content_encoding", supported)
        if self._pending:
            await asyncio.sleep(0)
        else:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                return message
            self._coded = message.get("body", b"")
            self._arrived = not message.get("more_body", False)
            self._received += len(self._coded)
            if self._received > self._limit:
                too_long = f"the request body is longer than {self._limit} bytes"
                raise RequestError("body_too_long", too_long, limit=self._limit)
        try:
            body = self._decode()
        except zlib.error as error:
            damaged = f"the request body is not valid {self._codings[0]}"
            raise RequestError("invalid_content_encoding", damaged) from error
        more = self._pending or not self._arrived
        return {"type": "http.request", "body": body, "more_body": more}

    def _decode(self) -> bytes:
        """Returns the next part of the decoded body."""
        if not self._received:
            return b""
        if not self._stream:
            self._stream = zlib.decompressobj(self._format())
        body = self._stream.decompress(self._coded, _PART)
        self._coded = self._stream.unconsumed_tail
        self._pending = bool(self._coded) or len(body) == _PART
        if self._stream.unused_data:
            raise zlib.error("the body continues behind the end of the coding")
        if self._arrived and not self._pending and not self._stream.eof:
            raise zlib.error("the body ends before the end of the coding")
        return body

    def _format(self) -> int:
        """Returns the number by which zlib knows the format."""
        if self._codings != ["deflate"]:
            return 16 + zlib.MAX_WBITS
        # Some clients send deflate without the header of zlib, whose first byte ends with 8.
        return zlib.MAX_WBITS if self._coded[0] & 15 == 8 else -zlib.MAX_WBITS
