from pathlib import Path

import pytest

from core.errors import ProviderError
from models.encoders.providers import (
    MAX_ROWS,
    Buckets,
    ProviderName,
    ProviderOptions,
    check_available,
    check_matrix_products,
    engine_folder,
    execution_providers,
    start_error,
    warm_up_shapes,
)
from tests.encoders import make_spec
from tests.errors import raises

CPU, CUDA, TENSORRT = (
    "CPUExecutionProvider",
    "CUDAExecutionProvider",
    "TensorrtExecutionProvider",
)
SPEC = make_spec().model_copy(update={"max_length": 512, "weights_sha256": "ab" * 32})


def test_buckets_are_powers_of_two_up_to_the_maxima() -> None:
    assert Buckets.up_to(8, 512) == Buckets((1, 2, 4, 8), (16, 32, 64, 128, 256, 512))
    assert Buckets.up_to(12, 100) == Buckets((1, 2, 4, 8, 12), (16, 32, 64, 100))
    assert Buckets.up_to(1, 10) == Buckets((1,), (10,))


@pytest.mark.parametrize(
    ("needed", "padded"),
    [
        ((1, 1), (1, 16)),
        ((1, 16), (1, 16)),
        ((2, 17), (2, 32)),
        ((3, 65), (4, 128)),
        ((5, 257), (8, 512)),
        ((8, 512), (8, 512)),
    ],
)
def test_a_batch_is_padded_to_the_smallest_bucket_that_fits(
    needed: tuple[int, int], padded: tuple[int, int]
) -> None:
    assert Buckets.up_to(8, 512).fit(*needed) == padded


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_only_tensorrt_pads_to_buckets(name: ProviderName) -> None:
    assert ProviderOptions(name).buckets(512) is None
    options = ProviderOptions("tensorrt", batch_tokens=8 * 512)
    assert options.buckets(512) == Buckets.up_to(8, 512)


def test_the_processor_has_no_options() -> None:
    assert execution_providers(ProviderOptions(), SPEC) == [(CPU, {})]


def test_cuda_uses_the_requested_device() -> None:
    providers = execution_providers(ProviderOptions("cuda", device=3), SPEC)
    assert [name for name, _ in providers] == [CUDA, CPU]
    assert providers[0][1]["device_id"] == "3"


def test_tensorrt_options_have_all_shapes_and_the_engine_folder() -> None:
    options = ProviderOptions("tensorrt", 1, Path("engines"), batch_tokens=8 * 512)
    providers = execution_providers(options, SPEC)
    assert [name for name, _ in providers] == [TENSORRT, CUDA, CPU]
    folder = f"engines/{'ab' * 32}"
    assert providers[0][1] == {
        "device_id": "1",
        "trt_profile_min_shapes": "input_ids:1x16,attention_mask:1x16",
        "trt_profile_opt_shapes": "input_ids:8x32,attention_mask:8x32",
        "trt_profile_max_shapes": "input_ids:8x512,attention_mask:8x512",
        "trt_engine_cache_enable": "True",
        "trt_engine_cache_path": folder,
        "trt_timing_cache_enable": "True",
        "trt_timing_cache_path": folder,
        "trt_engine_hw_compatible": "False",
        "trt_fp16_enable": "True",
        "trt_layer_norm_fp32_fallback": "True",
    }


def test_tensorrt_can_compute_in_full_precision() -> None:
    options = execution_providers(ProviderOptions("tensorrt", fp16=False), SPEC)[0][1]
    assert options["trt_fp16_enable"] == "False"


def test_other_weights_have_another_engine_folder() -> None:
    other = SPEC.model_copy(update={"weights_sha256": "cd" * 32})
    options = ProviderOptions("tensorrt")
    assert engine_folder(options, SPEC) != engine_folder(options, other)


@pytest.mark.parametrize("max_length", [8, 20, 512])
def test_every_padded_shape_is_inside_tensorrts_profile(max_length: int) -> None:
    options = ProviderOptions("tensorrt", batch_tokens=6 * max_length)
    spec = SPEC.model_copy(update={"max_length": max_length})
    profile = execution_providers(options, spec)[0][1]

    def limits(key: str) -> tuple[int, int]:
        rows, length = profile[key].split(",")[0].removeprefix("input_ids:").split("x")
        return int(rows), int(length)

    low, best, high = (limits(f"trt_profile_{part}_shapes") for part in ("min", "opt", "max"))
    assert low[0] <= best[0] <= high[0]
    assert low[1] <= best[1] <= high[1]
    buckets = options.buckets(max_length)
    assert buckets is not None
    for rows in range(1, 7):
        for length in range(1, max_length + 1):
            padded = buckets.fit(rows, length)
            assert low[0] <= padded[0] <= high[0]
            assert low[1] <= padded[1] <= high[1]


def test_warm_up_shapes_depend_on_the_provider() -> None:
    assert warm_up_shapes(ProviderOptions(), 512) == [(1, 16)]
    cuda = [(1, 16), (12, 16), (1, 32), (6, 32), (1, 48), (4, 48)]
    assert warm_up_shapes(ProviderOptions("cuda", batch_tokens=200), 48) == cuda
    # An engine takes as many rows of short texts as of the longest ones.
    tensorrt = [(1, 16), (4, 16), (1, 32), (4, 32), (1, 48), (4, 48)]
    assert warm_up_shapes(ProviderOptions("tensorrt", batch_tokens=200), 48) == tensorrt
    assert warm_up_shapes(ProviderOptions("cuda", batch_tokens=10), 16) == [(1, 16)]


@pytest.mark.parametrize("name", ["cuda", "tensorrt"])
@pytest.mark.parametrize("max_length", [32, 512, 8192, 32_768])
def test_batches_of_warm_up_and_profile_are_bounded_by_tokens(
    name: ProviderName, max_length: int
) -> None:
    options = ProviderOptions(name, batch_tokens=16_384)
    spec = SPEC.model_copy(update={"max_length": max_length})
    bound = max(16_384, max_length)
    shapes = warm_up_shapes(options, max_length)
    assert all(rows * length <= bound for rows, length in shapes)
    assert max(rows for rows, _ in shapes) <= MAX_ROWS
    if name == "tensorrt":
        profile = execution_providers(options, spec)[0][1]["trt_profile_max_shapes"]
        rows, length = profile.split(",")[0].removeprefix("input_ids:").split("x")
        assert (int(rows), int(length)) == max(shapes, key=lambda shape: (shape[1], shape[0]))


@pytest.mark.parametrize(("name", "packages"), [("cuda", ""), ("tensorrt", " 'tensorrt-cu13<11'")])
def test_a_provider_that_is_not_installed_is_an_error_with_the_command(
    name: ProviderName, packages: str
) -> None:
    install = f"python -m care.gpu_builds{packages}"
    with raises(ProviderError, "provider_not_installed", provider=name, install=install) as caught:
        check_available(ProviderOptions(name), [CPU], "1.31.1")
    assert install in str(caught.value)


def test_an_installed_provider_is_accepted() -> None:
    check_available(ProviderOptions("cuda"), [TENSORRT, CUDA, CPU], "1.31.1")
    check_available(ProviderOptions(), [CPU], "1.31.1")


def test_the_reason_of_a_failed_start_is_one_line() -> None:
    error = start_error(ProviderOptions("cuda", device=2), "1.31.1", "no driver\n\nsee the log\n")
    assert (error.code, error.fields["device"]) == ("provider_not_started", 2)
    assert "no driver see the log" in str(error)


def test_matrix_products_of_another_provider_are_an_error() -> None:
    weights = Path("query.onnx")
    placed = [(CUDA, "MatMul"), (CPU, "Shape"), (CPU, "Gather")]
    check_matrix_products(ProviderOptions("cuda"), weights, placed)
    mixed = [*placed, (CPU, "MatMulIntegerToFloat"), (CPU, "MatMulIntegerToFloat")]
    elsewhere = ["MatMulIntegerToFloat"]
    with raises(ProviderError, "unsupported_operators", path=weights, operators=elsewhere):
        check_matrix_products(ProviderOptions("cuda"), weights, mixed)
    with raises(ProviderError, "unsupported_operators", operators=["MatMul"]):
        check_matrix_products(ProviderOptions("tensorrt"), weights, placed)
