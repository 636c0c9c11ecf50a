"""What the checks of `make test-gpu` return, and how they compare vectors."""

import importlib.util
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from core.types import FloatArray

Figures = dict[str, str]

# Lowest cosine to float32 on a processor. bfloat16 keeps 8 bits of a number.
SAME, HALF = 0.9999, 0.99


class NotInstalledError(Exception):
    """What a check needs is not installed."""


def check(found: FloatArray, expected: FloatArray, least: float) -> float:
    """Checks the lowest cosine of vectors of unit norm, and returns it."""
    cosine = float((found * expected).sum(axis=1).min())
    if not cosine >= least:
        raise RuntimeError(f"lowest cosine {cosine:.5f} instead of {least}")
    return cosine


def require(*distributions: str) -> str:
    """Returns the version of the first of these packages that is installed.

    Raises:
        NotInstalledError: If none is.
    """
    for name in distributions:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    raise NotInstalledError(distributions[0])


def require_module(name: str) -> None:
    """Raises NotInstalledError if a module is not installed that another process will import."""
    if importlib.util.find_spec(name) is None:
        raise NotInstalledError(name)


def provider_options(name: Any, scratch: Path) -> Any:
    """Returns the options of a provider of ONNX Runtime.

    Raises:
        NotInstalledError: If the installed ONNX Runtime does not include it.
    """
    import onnxruntime

    from models.encoders.providers import ProviderOptions

    options = ProviderOptions(name, cache=scratch / "engines")
    if options.onnx_name not in onnxruntime.get_available_providers():
        raise NotInstalledError(f"onnxruntime-gpu with {options.onnx_name}")
    return options
