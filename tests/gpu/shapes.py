"""The models of the paper in their real shapes, with random weights, and texts for them.

Without a GPU the same code runs with the small shapes that the other tests have.
"""

import json
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from core.encoders import EncoderSpec, Pair
from tests.checkpoints import checkpoint_spec, write_gte_mlm, write_qwen3

SAMPLE = Path(__file__).parents[2] / "data" / "sample"
# config.json of Qwen/Qwen3-8B and of Alibaba-NLP/gte-multilingual-mlm-base.
_QWEN3_8B = {
    "vocab_size": 151_936,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
}
_GTE_BASE = {
    "vocab_size": 250_048,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 8192,
}
_LENGTH = 512
# Weights of this size keep the activations of deep models in the range of bfloat16.
_DEEP = {"initializer_range": 0.02}


def passages(count: int) -> list[str]:
    """Returns passages of the sample corpus, repeated if there are too few."""
    lines = (SAMPLE / "corpus.jsonl").read_text("utf-8").splitlines()
    texts = [json.loads(line)["text"] for line in lines]
    return [texts[i % len(texts)] for i in range(count)]


def queries(count: int) -> list[str]:
    """Returns queries of the sample corpus, repeated if there are too few."""
    lines = (SAMPLE / "queries.jsonl").read_text("utf-8").splitlines()
    texts = [json.loads(line)["text"] for line in lines]
    return [texts[i % len(texts)] for i in range(count)]


def document_checkpoint(scratch: Path, *, gpu: bool) -> Path:
    """Returns a checkpoint of the shape of Qwen3-8B in bfloat16; it is written once."""
    folder = scratch / "qwen3-8b"
    if not (folder / "config.json").is_file():
        shape: dict[str, Any] = _QWEN3_8B | _DEEP if gpu else {"max_position_embeddings": _LENGTH}
        with ExitStack() as stack:
            if gpu:
                stack.enter_context(torch.device("cuda"))
                torch.set_default_dtype(torch.bfloat16)
                stack.callback(torch.set_default_dtype, torch.float32)
            # As in the chat model from which the paper starts: its tokenizer ends no text.
            write_qwen3(folder, ends_texts=False, texts=passages(200), tokens=4_000, **shape)
    return folder


def document_spec(scratch: Path, *, gpu: bool) -> EncoderSpec:
    """Returns the spec of the document encoder, of 512 tokens and 768 dimensions if on a GPU."""
    checkpoint = document_checkpoint(scratch, gpu=gpu)
    changes: dict[str, Any] = {"max_length": _LENGTH}
    if gpu:
        changes |= {"dimension": 768, "native_dimension": _QWEN3_8B["hidden_size"]}
    return checkpoint_spec(checkpoint, "last_token", **changes)


def query_checkpoint(scratch: Path, *, gpu: bool) -> Path:
    """Returns a checkpoint of the shape of gte-multilingual-mlm-base; it is written once."""
    folder = scratch / "gte-0.3b"
    if not (folder / "config.json").is_file():
        shape: dict[str, Any] = _GTE_BASE | _DEEP if gpu else {"max_position_embeddings": _LENGTH}
        write_gte_mlm(folder, texts=[*passages(1_000), *queries(100)], **shape)
    return folder


def query_pair(scratch: Path, *, gpu: bool) -> Pair:
    """Returns a pair with the query encoder on both sides."""
    checkpoint = query_checkpoint(scratch, gpu=gpu)
    changes: dict[str, Any] = {"max_length": _LENGTH, "weights": checkpoint.name}
    if gpu:
        changes |= {"dimension": 768, "native_dimension": 768}
    query, document = (
        checkpoint_spec(checkpoint, "cls", **changes, role=role) for role in ("query", "document")
    )
    return Pair(name="gte", description="random", folder=scratch, query=query, document=document)


def matrix_rate(device: str) -> float:
    """Returns the rate of a product of large bfloat16 matrices [FLOP/s]: the machine's peak."""
    n = 8192 if device == "cuda" else 512
    a, b = (torch.randn(n, n, dtype=torch.bfloat16, device=device) for _ in range(2))
    return 2 * n**3 / median_seconds(lambda: a @ b, device, repeat=20)


def median_seconds(work: Callable[[], object], device: str, repeat: int) -> float:
    """Returns the median time of `work` [s], after one call that is not counted."""
    taken = []
    for _ in range(repeat + 1):
        started = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - started)
    return sorted(taken[1:])[repeat // 2]


def flops_of_tokens(model: Any, tokens: int) -> float:
    """Returns the FLOP of a forward pass: two per weight and token, without the embeddings."""
    weights = sum(value.numel() for value in model.parameters())
    return 2.0 * tokens * (weights - model.get_input_embeddings().weight.numel())
