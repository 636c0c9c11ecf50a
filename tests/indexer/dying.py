"""An encoder whose process really dies at some texts, and is started again."""

import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import Any

from core.encoders import Encoding
from core.errors import ProviderError
from tests.encoders import BigramEncoder

POISON = "毒"

_CONTEXT = get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.indexer.dying"])


class ProcessEncoder(BigramEncoder):
    """Encodes in a process that dies at each batch with a poisoned text.

    Args:
        poison: What a text must hold to be poisoned; "" poisons all.
        stumbles: Batches, counted from 0, at which the process dies whatever they hold.
    """

    def __init__(self, poison: str = POISON, stumbles: Sequence[int] = ()) -> None:
        super().__init__("document")
        self._poison = poison
        self._stumbles = stumbles
        self._pool: ProcessPoolExecutor | None = None
        self.batches: list[int] = []
        self.deaths = 0

    def encode(self, texts: Sequence[str]) -> Encoding:
        self._pool = self._pool or ProcessPoolExecutor(1, _CONTEXT)
        dies = len(self.batches) in self._stumbles or any(self._poison in t for t in texts)
        self.batches.append(len(texts))
        try:
            return self._pool.submit(_encode, list(texts), dies).result()
        except BrokenProcessPool as error:
            self.deaths += 1
            self.close()
            raise ProviderError("the process has ended") from error

    def close(self) -> None:
        """Ends the process."""
        if self._pool:
            self._pool.shutdown()
        self._pool = None

    def __enter__(self) -> "ProcessEncoder":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def _encode(texts: list[str], dies: bool) -> Encoding:
    if dies:
        os._exit(1)
    return BigramEncoder("document").encode(texts)
