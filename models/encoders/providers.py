"""Execution providers of ONNX Runtime, and the shapes of batches that they need.

If a provider is not installed, does not start or lacks an operator, ONNX Runtime falls back to the
processor with a log message. This module raises an error instead.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

from core.encoders import EncoderSpec
from core.errors import ProviderError

ProviderName = Literal["cpu", "cuda", "tensorrt"]

CPU = "CPUExecutionProvider"
CUDA = "CUDAExecutionProvider"
TENSORRT = "TensorrtExecutionProvider"

_TITLES: Mapping[ProviderName, str] = {"cpu": CPU, "cuda": CUDA, "tensorrt": TENSORRT}
# Most texts of a batch.
MAX_ROWS = 64
# Most tokens of a batch on a GPU, padding included.
BATCH_TOKENS = 16_384
_SHORTEST = 16
# A query of care-mini has 8 to 32 tokens; TensorRT optimises its kernels for this length.
_TYPICAL_LENGTH = 32
# ONNX Runtime 1.31 requires libnvinfer.so.10.
_TENSORRT_LIBRARY = " 'tensorrt-cu13<11'"
# Operators that dominate the time of an encoder; others may be placed on the processor.
_PRODUCTS = ("MatMul", "Gemm", "Attention")


@dataclass(frozen=True, slots=True)
class ProviderOptions:
    """Options of an execution provider."""

    name: ProviderName = "cpu"
    device: int = 0  # number of the GPU
    # Folder of TensorRT's engine caches, with one subfolder per weights file.
    cache: Path = Path("builds/tensorrt")
    fp16: bool = True  # whether TensorRT may compute in half precision
    # Most tokens of a batch on a GPU, padding included; a longer text is a batch of its own. The
    # warm-up and the engines of TensorRT cover batches up to this size.
    batch_tokens: int = BATCH_TOKENS

    @property
    def onnx_name(self) -> str:
        """Name of the provider in ONNX Runtime."""
        return _TITLES[self.name]

    def buckets(self, max_length: int) -> "Buckets | None":
        """Returns the shapes to which batches are padded, or None without restriction."""
        if self.name != "tensorrt":
            return None
        # An engine has one range of rows and one of lengths, and reserves memory for both maxima.
        return Buckets.up_to(self.rows(max_length), max_length)

    def rows(self, length: int) -> int:
        """Returns the most rows of a batch whose longest text has `length` tokens."""
        return max(1, min(MAX_ROWS, self.batch_tokens // length))


ON_CPU = ProviderOptions()


@dataclass(frozen=True, slots=True)
class Buckets:
    """Shapes to which batches are padded: numbers of rows and of tokens, both ascending."""

    rows: tuple[int, ...]
    lengths: tuple[int, ...]

    @classmethod
    def up_to(cls, max_rows: int, max_length: int) -> Self:
        """Returns powers of two, from 1 row and 16 tokens, up to the given maxima."""
        return cls(rows=_doubled(1, max_rows), lengths=_doubled(_SHORTEST, max_length))

    def fit(self, rows: int, length: int) -> tuple[int, int]:
        """Returns the smallest shape for a batch; ValueError if it exceeds the largest shape."""
        return min(r for r in self.rows if r >= rows), min(n for n in self.lengths if n >= length)


def _doubled(first: int, last: int) -> tuple[int, ...]:
    """Returns powers of two from `first`, then `last`."""
    return (first, *_doubled(2 * first, last)) if first < last else (last,)


def warm_up_shapes(options: ProviderOptions, max_length: int) -> list[tuple[int, int]]:
    """Returns the shapes (rows, tokens) of the warm-up, the smallest first.

    On a processor one short text is enough. On a GPU each length is run with one row and with the
    most rows of a batch, to select kernels and allocate memory.
    """
    if options.name == "cpu":
        return [(1, min(_SHORTEST, max_length))]
    buckets = options.buckets(max_length)
    return [
        (rows, length)
        for length in _doubled(_SHORTEST, max_length)
        for rows in sorted({1, buckets.rows[-1] if buckets else options.rows(length)})
    ]


def execution_providers(
    options: ProviderOptions, spec: EncoderSpec
) -> list[tuple[str, dict[str, str]]]:
    """Returns the providers of a session and their options, by descending priority."""
    device = {"device_id": str(options.device)}
    cuda = (CUDA, device | {"arena_extend_strategy": "kSameAsRequested"})
    if options.name == "cpu":
        return [(CPU, {})]
    if options.name == "cuda":
        return [cuda, (CPU, {})]
    return [(TENSORRT, device | _tensorrt_options(options, spec)), cuda, (CPU, {})]


def engine_folder(options: ProviderOptions, spec: EncoderSpec) -> Path:
    """Returns the folder of the TensorRT engine of a weights file.

    ONNX Runtime names engines by graph, GPU and versions but not by weights, so each weights file
    needs a separate folder.
    """
    return options.cache / spec.weights_sha256


def _tensorrt_options(options: ProviderOptions, spec: EncoderSpec) -> dict[str, str]:
    folder = str(engine_folder(options, spec))
    most = options.rows(spec.max_length)
    fp16 = str(options.fp16)
    return {
        # The profile covers all shapes; otherwise an engine would be built during a request.
        "trt_profile_min_shapes": _shape(1, min(_SHORTEST, spec.max_length)),
        "trt_profile_opt_shapes": _shape(most, min(_TYPICAL_LENGTH, spec.max_length)),
        "trt_profile_max_shapes": _shape(most, spec.max_length),
        "trt_engine_cache_enable": "True",
        "trt_engine_cache_path": folder,
        "trt_timing_cache_enable": "True",
        "trt_timing_cache_path": folder,
        "trt_engine_hw_compatible": "False",
        "trt_fp16_enable": fp16,
        # The squares in layer normalisation overflow in half precision.
        "trt_layer_norm_fp32_fallback": fp16,
    }


def _shape(rows: int, length: int) -> str:
    return ",".join(f"{name}:{rows}x{length}" for name in ("input_ids", "attention_mask"))


def check_available(options: ProviderOptions, available: Sequence[str], version: str) -> None:
    """Raises `ProviderError` if the installed ONNX Runtime does not include the provider."""
    if options.onnx_name not in available:
        command = "python -m care.gpu_builds" + _TENSORRT_LIBRARY * (options.name == "tensorrt")
        raise ProviderError(
            f"the installed ONNX Runtime {version} does not include provider '{options.name}': "
            f"install the builds for GPUs with `{command}` (in a checkout: `make gpu`)",
            code="provider_not_installed",
            provider=options.name,
            install=command,
        )


def start_error(
    options: ProviderOptions,
    version: str,
    reason: str = "see the messages of ONNX Runtime above for the missing library or driver",
) -> ProviderError:
    """Returns the error of a provider that is installed but does not start."""
    command = _install(options, version)
    return ProviderError(
        f"provider '{options.name}' did not start on GPU {options.device} "
        f"({' '.join(reason.split())}): install its libraries with `{command}`",
        code="provider_not_started",
        provider=options.name,
        device=options.device,
        install=command,
    )


def check_matrix_products(
    options: ProviderOptions, weights: Path, placed: Iterable[tuple[str, str]]
) -> None:
    """Raises ProviderError if another provider computes a matrix product of the graph `weights`.

    `placed` are the provider and the operator of each node of the graph.
    """
    others = {operator for provider, operator in placed if provider != options.onnx_name}
    elsewhere = sorted(o for o in others if any(product in o for product in _PRODUCTS))
    if elsewhere:
        # TensorRT supports only operators of the ONNX standard.
        form = "quantisation or fusion" if options.name == "tensorrt" else "quantisation"
        raise ProviderError(
            f"{weights} has operators that provider '{options.name}' does not support "
            f"({', '.join(elsewhere)}): export the query encoder without {form}, or use provider "
            "'cpu'",
            code="unsupported_operators",
            provider=options.name,
            path=weights,
            operators=elsewhere,
        )


def _install(options: ProviderOptions, version: str) -> str:
    command = f"pip install 'onnxruntime-gpu[cuda,cudnn]=={version}'"
    return command + _TENSORRT_LIBRARY * (options.name == "tensorrt")
