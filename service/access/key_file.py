"""Files of keys, which the service reads again while it runs."""

import asyncio
import logging
from collections.abc import Callable
from errno import EFBIG
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from core.errors import CareError, describe
from core.files import read_small
from service.access.api_keys import ApiKeys
from service.access.tokens import Tokens
from service.observe.metrics import Metrics

_LOG = logging.getLogger("care.service")
# A new content takes effect within this time and the time to read it [s].
_READ_EVERY = 1.0
_MAX_BYTES = 1 << 20


_Keys = TypeVar("_Keys", ApiKeys, Tokens)


class FollowedFile(Generic[_Keys]):
    """A file of keys that is read again while the service runs; `variable` is its setting.

    The content is compared, because a mounted secret changes by a link: the time and the size of
    the file may stay. `keys` are those of the last content without a fault. `parse` returns the
    keys of a content; CareError if the first one is wrong or cannot be read.
    """

    def __init__(self, path: Path, parse: Callable[[bytes], _Keys], variable: str) -> None:
        self._path = path
        self._parse: Callable[[bytes], _Keys] = parse
        self._variable = variable
        self._content = self._read()
        self.keys: _Keys = parse(self._content)

    async def follow(self, metrics: Metrics, *, quiet: bool = False) -> None:
        """Reads the file each second and replaces the keys when its content has changed.

        If the file is missing or wrong, the keys stay; one error is logged for each fault. `quiet`
        is for workers beside one that logs and counts.
        """
        fault: dict[str, Any] | None = None
        while True:
            await asyncio.sleep(_READ_EVERY)
            try:
                keys = await asyncio.to_thread(self._changed)
            except Exception as error:
                fields = describe(error)
                if isinstance(error, CareError):
                    fields = {"code": error.code, **error.fields}
                if fields != fault and not quiet:
                    message = f"keys of {self._variable} not replaced: the last keys stay"
                    _LOG.error(message, extra={"fields": fields})
                    metrics.key_reloads.labels("failure").inc()
                fault = fields
                continue
            fault = None
            if keys:
                self.keys.replace(keys)
            if keys and not quiet:
                message = f"keys of {self._variable} replaced"
                _LOG.info(message, extra={"fields": {"count": len(keys)}})
                metrics.key_reloads.labels("success").inc()

    def _changed(self) -> _Keys | None:
        """Returns the keys of another content than before, or None."""
        content = self._read()
        if content == self._content:
            return None
        keys = self._parse(content)
        self._content = content
        return keys

    def _read(self) -> bytes:
        try:
            return read_small(self._path, _MAX_BYTES)
        except OSError as error:
            if error.errno == EFBIG:
                reason = f"is larger than {_MAX_BYTES} bytes: name a file of keys"
                code, fields = "key_file_too_large", {"limit": _MAX_BYTES}
            else:
                reason = f"cannot be read ({error.strerror}): correct {self._variable}"
                code, fields = "key_file_unreadable", {}
            raise CareError.at(self._path, reason, code, **fields) from None


class KeyFile(FollowedFile[ApiKeys]):
    """The file of API keys: tables of TOML, or entries one per line or separated by commas.

    `#` begins a comment in both; a file with a line that begins with `[` is TOML. Entries without
    grants open `index`. CareError if an entry is wrong, or there is none; the message does not
    quote secrets or hashes.
    """

    def __init__(self, path: Path, index: str) -> None:
        super().__init__(path, partial(_parse, index=index), "CARE_API_KEYS_FILE")


def _parse(content: bytes, index: str) -> ApiKeys:
    text = content.decode("utf-8-sig", errors="replace")
    lines = text.splitlines()
    if any(line.lstrip().startswith("[") for line in lines):
        return ApiKeys.parse_toml(text)
    parts = [part for line in lines for part in line.partition("#")[0].split(",")]
    entries = ",".join(part for part in parts if part.strip())
    if not entries:
        message = "CARE_API_KEYS_FILE names a file without entries: make one with `care key`"
        raise CareError(message, code="no_api_keys")
    return ApiKeys.parse(entries, index, "CARE_API_KEYS_FILE")
