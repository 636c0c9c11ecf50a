"""What an encoder runs on: ONNX Runtime's execution providers, and the shapes they want.

When a provider is not installed, does not start or lacks an operator, ONNX Runtime falls back
to the processor and only logs it. Here each of the three is an error.
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
_SHORTEST = 16
# A query of care-mini has 8 to 32 tokens; TensorRT takes the kernels that are fastest here.
_TYPICAL_LENGTH = 32
# What costs the time of an encoder; beside it, shapes and masks may lie on the processor.
_PRODUCTS = ("MatMul", "Gemm", "Attention")


@dataclass(frozen=True, slots=True)
class ProviderOptions:
    """What an encoder runs on.

    Attributes:
        name: The provider.
        device: Number of the GPU.
        cache: Folder where TensorRT keeps its engines, a folder for each weights file.
        fp16: Whether TensorRT may compute in half precision.
        max_batch: The most rows that TensorRT encodes at once, larger batches are split;
            for CUDA the largest batch of the warm-up.
    """

    name: ProviderName = "cpu"
    device: int = 0
    cache: Path = Path("builds/tensorrt")
    fp16: bool = True
    max_batch: int = 64

    @property
    def title(self) -> str:
        """The provider's name in ONNX Runtime."""
        return _TITLES[self.name]

    def buckets(self, max_length: int) -> "Buckets | None":
        """Returns the shapes that batches are padded to, or None where any shape is as good."""
        return Buckets.up_to(self.max_batch, max_length) if self.name == "tensorrt" else None


ON_CPU = ProviderOptions()


@dataclass(frozen=True, slots=True)
class Buckets:
    """The few shapes that batches are padded to: numbers of rows and of tokens, both rising."""

    rows: tuple[int, ...]
    lengths: tuple[int, ...]

    @classmethod
    def up_to(cls, max_rows: int, max_length: int) -> Self:
        """Returns powers of two from 1 row and from 16 tokens, ended by the two maxima."""
        return cls(rows=_doubled(1, max_rows), lengths=_doubled(_SHORTEST, max_length))

    def fit(self, rows: int, length: int) -> tuple[int, int]:
        """Returns the smallest shape that holds `rows` rows of `length` tokens, if there is one."""
        return min(r for r in self.rows if r >= rows), min(n for n in self.lengths if n >= length)


def _doubled(first: int, last: int) -> tuple[int, ...]:
    return (first, *_doubled(2 * first, last)) if first < last else (last,)


def warm_up_shapes(options: ProviderOptions, max_length: int) -> list[tuple[int, int]]:
    """Returns the shapes (rows, tokens) to run before the first request, smallest first.

    A processor has no more to prepare than a short text shows; a GPU needs each length, with
    one row and with the most, for its kernels and its memory.
    """
    if options.name == "cpu":
        return [(1, min(_SHORTEST, max_length))]
    lengths = Buckets.up_to(options.max_batch, max_length).lengths
    return [(rows, n) for n in lengths for rows in sorted({1, options.max_batch})]


def execution_providers(
    options: ProviderOptions, spec: EncoderSpec
) -> list[tuple[str, dict[str, str]]]:
    """Returns the providers and their options for a session of ONNX Runtime, best first."""
    device = {"device_id": str(options.device)}
    cuda = (CUDA, device | {"arena_extend_strategy": "kSameAsRequested"})
    if options.name == "cpu":
        return [(CPU, {})]
    if options.name == "cuda":
        return [cuda, (CPU, {})]
    return [(TENSORRT, device | _tensorrt_options(options, spec)), cuda, (CPU, {})]


def engine_folder(options: ProviderOptions, spec: EncoderSpec) -> Path:
    """Returns where TensorRT keeps the engine of these weights.

    ONNX Runtime names an engine after the graph, the GPU and the versions, not after the
    weights, so that each weights file needs a folder of its own.
    """
    return options.cache / spec.weights_sha256


def _tensorrt_options(options: ProviderOptions, spec: EncoderSpec) -> dict[str, str]:
    folder = str(engine_folder(options, spec))
    buckets = Buckets.up_to(options.max_batch, spec.max_length)
    fp16 = str(options.fp16)
    return {
        # One engine for all shapes: one outside the profile would be built during a request.
        "trt_profile_min_shapes": _shape(1, buckets.lengths[0]),
        "trt_profile_opt_shapes": _shape(options.max_batch, min(_TYPICAL_LENGTH, spec.max_length)),
        "trt_profile_max_shapes": _shape(options.max_batch, spec.max_length),
        "trt_engine_cache_enable": "True",
        "trt_engine_cache_path": folder,
        "trt_timing_cache_enable": "True",
        "trt_timing_cache_path": folder,
        "trt_engine_hw_compatible": "False",
        "trt_fp16_enable": fp16,
        # The squares in a layer norm pass the largest half-precision number.
        "trt_layer_norm_fp32_fallback": fp16,
    }


def _shape(rows: int, length: int) -> str:
    return ",".join(f"{name}:{rows}x{length}" for name in ("input_ids", "attention_mask"))


def check_available(options: ProviderOptions, available: Sequence[str], version: str) -> None:
    """Raises `ProviderError` if the installed ONNX Runtime of a version lacks the provider."""
    if options.title not in available:
        command = _install(options, version)
        raise ProviderError(
            f"the installed ONNX Runtime {version} has no provider '{options.name}': "
            f"run `pip uninstall -y onnxruntime` and then `{command}`",
            code="provider_not_installed",
            provider=options.name,
            install=command,
        )


def not_started(
    options: ProviderOptions,
    version: str,
    reason: str = "ONNX Runtime's lines above name the library or driver that is missing",
) -> ProviderError:
    """Returns the error of a provider that is installed and does not start."""
    command = _install(options, version)
    return ProviderError(
        f"the provider '{options.name}' did not start on GPU {options.device} "
        f"({' '.join(reason.split())}): `{command}` installs its libraries",
        code="provider_not_started",
        provider=options.name,
        device=options.device,
        install=command,
    )


def check_products(
    options: ProviderOptions, weights: Path, placed: Iterable[tuple[str, str]]
) -> None:
    """Raises `ProviderError` if another provider computes a matrix product of the graph `weights`.

    `placed` has for each node the name of its provider and its operator.
    """
    others = {operator for provider, operator in placed if provider != options.title}
    elsewhere = sorted(o for o in others if any(product in o for product in _PRODUCTS))
    if elsewhere:
        # TensorRT parses the operators of the ONNX standard alone.
        form = "quantisation or fusion" if options.name == "tensorrt" else "quantisation"
        raise ProviderError(
            f"{weights} has operators that '{options.name}' does not run "
            f"({', '.join(elsewhere)}): use a pair whose query encoder is exported "
            f"without {form}, or the provider 'cpu'",
            code="unsupported_operators",
            provider=options.name,
            path=weights,
            operators=elsewhere,
        )


def _install(options: ProviderOptions, version: str) -> str:
    command = f"pip install 'onnxruntime-gpu[cuda,cudnn]=={version}'"
    # ONNX Runtime 1.31 links libnvinfer.so.10.
    return f"{command} 'tensorrt-cu13<11'" if options.name == "tensorrt" else command
