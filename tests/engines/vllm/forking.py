"""Imported in the fork server of `preloaded.py`, so that vLLM forks its processes as well."""

import multiprocessing
from typing import Any

_get_context: Any = multiprocessing.get_context


def get_context(method: str | None = None) -> Any:
    """Returns the context of the fork server in place of that of new interpreters."""
    return _get_context("forkserver" if method == "spawn" else method)


multiprocessing.get_context = get_context
