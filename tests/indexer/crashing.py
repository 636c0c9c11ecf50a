"""An encoder in a process that crashes for some texts and is restarted."""

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
_CONTEXT.set_forkserver_preload(["tests.indexer.crashing"])


class CrashingEncoder(BigramEncoder):
    """Encodes in a process that crashes at each batch with a poisoned text.

    Args:
        poison: Substring of poisoned texts; "" poisons all.
        crashes_at: Numbers of batches, from 0, at which the process crashes with any text.
    """

    def __init__(self, poison: str = POISON, crashes_at: Sequence[int] = ()) -> None:
        super().__init__("document")
        self._poison = poison
        self._crashes_at = crashes_at
        self._pool: ProcessPoolExecutor | None = None
        self.batches: list[int] = []
        self.crashes = 0

    def encode(self, texts: Sequence[str]) -> Encoding:
        self._pool = self._pool or ProcessPoolExecutor(1, _CONTEXT)
        crash = len(self.batches) in self._crashes_at or any(self._poison in t for t in texts)
        self.batches.append(len(texts))
        try:
            return self._pool.submit(_encode, list(texts), crash).result()
        except BrokenProcessPool as error:
            self.crashes += 1
            self.close()
            raise ProviderError("the process has crashed") from error

    def close(self) -> None:
        if self._pool:
            self._pool.shutdown()
        self._pool = None

    def __enter__(self) -> "CrashingEncoder":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def _encode(texts: list[str], crash: bool) -> Encoding:
    if crash:
        os._exit(1)
    return BigramEncoder("document").encode(texts)
