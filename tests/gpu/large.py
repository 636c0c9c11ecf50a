"""The checks of `make test-gpu` with models in the paper's real shapes and random weights."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from core.types import FloatArray
from tests.gpu import shapes
from tests.gpu.figures import (
    HALF,
    SAME,
    Figures,
    NotInstalledError,
    check,
    provider_options,
    require_module,
)

RECIPE = Path(__file__).parents[2] / "training" / "recipes" / "care-0.3b-8b.yaml"
_STEPS = 4


def documents_8b(scratch: Path, *, gpu: bool) -> Figures:
    """Encodes passages with a model of the shape of Qwen3-8B in bfloat16, as `care index` does."""
    import torch
    import transformers

    from models.encoders.transformers import TransformersEncoder

    device = "cuda" if gpu else "cpu"
    peak = shapes.matrix_rate(device)
    spec = shapes.document_spec(scratch, gpu=gpu)
    encoder = TransformersEncoder(spec, scratch, device=device, dtype="bfloat16")
    short = shapes.passages(1024 if gpu else 16)
    long = ["".join(short[i : i + 16]) for i in range(0, len(short), 16)]
    figures = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "matrix product": f"{peak / 1e12:.1f} TFLOP/s",
    }
    for texts in (short, long):
        tokens = sorted(encoder.tokenize(texts), key=len)
        together = encoder.encode_tokens(tokens).vectors
        alone = [encoder.encode_tokens([each]).vectors for each in tokens[::100]]
        check(together[::100], np.concatenate(alone), HALF)
        started = time.perf_counter()
        encoder.encode_tokens(tokens)
        seconds = time.perf_counter() - started
        total = sum(map(len, tokens))
        rate = shapes.flops_of_tokens(encoder.parts()[0], total) / seconds
        figures[f"passages of {total / len(texts):.0f} tokens"] = (
            f"{len(texts) / seconds:.1f}/s, {rate / 1e12:.1f} TFLOP/s, "
            f"{rate / peak:.0%} of a matrix product"
        )
    return figures | _memory(device)


def lora_8b(scratch: Path, *, gpu: bool) -> Figures:
    """Trains a LoRA adapter of this model, its weights sharded by FSDP2 over one process."""
    checkpoint = shapes.document_checkpoint(scratch, gpu=gpu)
    return torchrun(1, "-m", "tests.gpu.sharded", str(checkpoint), "lora")


def train_8b(scratch: Path, *, gpu: bool) -> Figures:
    """Runs two stages of the shipped recipe `care-0.3b-8b` for a few steps."""
    require_module("sentence_transformers")
    from training.files import RESULT, read_json

    document = shapes.document_checkpoint(scratch, gpu=gpu)
    query = shapes.query_checkpoint(scratch, gpu=gpu)
    triples = scratch / "triples.jsonl"
    texts, asked = shapes.passages(96), shapes.queries(40)
    with triples.open("w", encoding="utf-8") as file:
        for i, positive in enumerate(texts[:48]):
            row = {"query": asked[i % 40] + str(i), "positives": [positive]}
            file.write(json.dumps(row | {"negatives": [texts[48 + i]]}, ensure_ascii=False) + "\n")
    data = [{"triples": str(triples)}]
    stage: dict[str, Any] = {
        "data": data,
        "max_steps": _STEPS,
        "epochs": _STEPS,
        "batch": 16,
        "log_every": 1,
    }
    width = 4096 if gpu else 64
    changes: dict[str, Any] = {
        "extends": str(RECIPE),
        "query": {"start": str(query)},
        "document": {"start": str(document)} | ({} if gpu else {"dimension": 64}),
        "dev": None,
        "stages": dict.fromkeys(("retromae", "unsupervised", "contrastive", "teacher", "align"))
        | {
            "contrastive-large": stage | {"dimensions": [width // 4, width]},
            "joint": stage | ({} if gpu else {"precision": "bf16"}),
        },
    }
    recipe = scratch / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(changes, allow_unicode=True), encoding="utf-8")
    out = scratch / "train"
    command = ["-m", "care", "train", str(recipe), "--out", str(out)]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"care train failed: {done.stderr[-3000:]}")
    figures = {}
    for path in sorted((out / "stages").glob(f"*/{RESULT}")):
        result = read_json(path)
        figures[result["name"]] = f"{result['seconds']} s for {_STEPS} steps"
        losses = [e["loss"] for e in read_json(path.with_name("metrics.json")) if "loss" in e]
        figures[f"loss of {result['name']}"] = f"{losses[0]:.2f} to {losses[-1]:.2f}"
    return figures


def query_0_3b(scratch: Path, *, gpu: bool) -> Figures:
    """Encodes queries with a model of the shape of gte-multilingual-base in half precision.

    Its vectors must equal those of its exported graph on the processor, where that can be made.
    """
    from models.encoders.transformers import TransformersEncoder

    device, dtype = ("cuda", "float16") if gpu else ("cpu", "float32")
    pair = shapes.query_pair(scratch, gpu=gpu)
    encoder = TransformersEncoder(pair.query, scratch, device=device, dtype=dtype)
    figures = _speed(encoder, device)
    try:
        expected = _exported(scratch, gpu=gpu)
    except (NotInstalledError, ModuleNotFoundError) as error:
        missing = getattr(error, "name", None) or error
        return figures | {"ONNX on the processor": f"not compared, {missing} is not installed"}
    found = encoder.encode(shapes.queries(64)).vectors
    cosine = check(found, expected, SAME if dtype == "float32" else HALF)
    return figures | {"lowest cosine to ONNX on the processor": f"{cosine:.5f}"}


def onnxruntime_0_3b(scratch: Path, *, gpu: bool) -> Figures:
    """Encodes the same queries with the exported graphs and the CUDA provider of ONNX Runtime."""
    from models.encoders.onnx import OnnxEncoder
    from models.pairs import load_pair

    options = provider_options("cuda" if gpu else "cpu", scratch)
    expected = _exported(scratch, gpu=gpu)
    figures: Figures = {}
    for precision in ("fp32", "fp16") if gpu else ("fp32",):
        spec = load_pair(str(scratch / "gte" / f"pair-{precision}.toml")).query
        encoder = OnnxEncoder(spec, scratch / "gte", 1, options)
        encoder.warm_up()
        found = encoder.encode(shapes.queries(64)).vectors
        check(found, expected, SAME if precision == "fp32" else HALF)
        speed = _speed(encoder, "cuda" if gpu else "cpu")
        figures |= {f"{precision} {key}": value for key, value in speed.items()}
    return figures


def _exported(scratch: Path, *, gpu: bool) -> FloatArray:
    """Exports the query encoder once; returns vectors of its float32 graph on the processor."""
    for module in ("onnx", "faiss", "ir_measures"):
        require_module(module)
    from care.cli.main import main as care
    from models.encoders.onnx import OnnxEncoder
    from models.pairs import load_pair, write_pair

    found = scratch / "gte-expected.npy"
    if not found.is_file():
        write_pair(shapes.query_pair(scratch, gpu=gpu), scratch / "gte-pair.toml")
        # The export measures on the processor; few queries take less of a GPU's time.
        few = scratch / "queries.jsonl"
        few.write_text("".join(json.dumps({"text": each}) + "\n" for each in shapes.queries(8)))
        arguments = ["--pair", str(scratch / "gte-pair.toml"), "--out", str(scratch / "gte")]
        arguments += ["--calibration", str(few)]
        # Not --provider cuda: ONNX Runtime for GPUs may not be installed.
        if care(["export", *arguments, "--precision", "fp32,fp16", "--corpus", "none"]):
            raise RuntimeError("the export failed")
        spec = load_pair(str(scratch / "gte" / "pair-fp32.toml")).query
        graph = OnnxEncoder(spec, scratch / "gte", os.cpu_count() or 1)
        np.save(found, graph.encode(shapes.queries(64)).vectors)
    vectors: FloatArray = np.load(found)
    return vectors


def torchrun(processes: int, *arguments: str) -> Figures:
    """Trains in as many processes as asked, and returns the figures that the module prints."""
    require_module("sentence_transformers")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(processes), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"training failed: {done.stderr[-3000:]}")
    found: Figures = json.loads(done.stdout.splitlines()[-1])
    return found


def _speed(encoder: Any, device: str) -> Figures:
    """Measures single queries and batches of 64, with tokenization."""
    texts = shapes.queries(64)
    one = shapes.median_seconds(lambda: encoder.encode(texts[:1]), device, repeat=50)
    many = shapes.median_seconds(lambda: encoder.encode(texts), device, repeat=20)
    return {"one query": f"{1000 * one:.2f} ms", "batches of 64": f"{64 / many:.0f} queries/s"}


def _memory(device: str) -> Figures:
    import torch

    if device == "cpu":
        return {}
    return {"GPU memory": f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB"}
