"""A build with vLLM, and the service with its index."""

import json
import subprocess
import sys
import urllib.request
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel

from core.encoders import EncoderSpec
from core.files import sha256_file
from core.service_process import running_service
from core.versions import IndexFolder, read_manifest
from tests.checkpoints import MAX_LENGTH, checkpoint_spec
from tests.conftest import make_records, write_jsonl

DIMENSION = 48
COUNT = 40


class _QueryGraph(torch.nn.Module):
    """A decoder for the service: last-token pooling and normalisation."""

    def __init__(self, checkpoint: Path) -> None:
        super().__init__()
        self.model = AutoModel.from_pretrained(checkpoint, attn_implementation="eager")

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        states = self.model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
        last = states[torch.arange(states.shape[0]), mask.sum(dim=1) - 1]
        return torch.nn.functional.normalize(last, dim=1)


@pytest.fixture
def query(qwen3: Path, tmp_path: Path) -> EncoderSpec:
    """Exports the checkpoint as the query encoder of a symmetric pair."""
    ids = torch.ones((2, 7), dtype=torch.int64)
    mask = torch.ones_like(ids)
    mask[1, 4:] = 0
    names, axes = ["input_ids", "attention_mask"], {0: "n", 1: "length"}
    weights, tokenizer = tmp_path / "query.onnx", qwen3 / "tokenizer.json"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            _QueryGraph(qwen3).eval(),
            (ids, mask),
            weights,
            dynamo=False,
            input_names=names,
            output_names=["sentence_embedding"],
            dynamic_axes=dict.fromkeys(names, axes) | {"sentence_embedding": {0: "n"}},
        )
    return checkpoint_spec(
        qwen3,
        role="query",
        format="onnx",
        weights=str(weights),
        weights_sha256=sha256_file(weights),
        tokenizer=str(tokenizer),
        tokenizer_sha256=sha256_file(tokenizer),
        dimension=DIMENSION,
    )


def write_pair(path: Path, query: EncoderSpec, document: EncoderSpec) -> Path:
    lines = ['name = "tiny"', 'description = "d"', f'embedding_space = "{query.embedding_space}"']
    for spec in (query, document):
        facts = spec.model_dump(exclude={"role", "embedding_space"}, exclude_defaults=True)
        lines += [
            f"[{spec.role}]",
            *(f"{key} = {json.dumps(value)}" for key, value in facts.items()),
        ]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def search(address: str, text: str) -> list[dict[str, Any]]:
    body = json.dumps({"query": text, "top_k": 3}).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{address}/search", body, headers)
    with urllib.request.urlopen(request) as response:
        hits: list[dict[str, Any]] = json.load(response)["hits"]
    return hits


def test_an_index_encoded_by_vllm_is_searched(
    qwen3: Path, query: EncoderSpec, tmp_path: Path
) -> None:
    records = [record | {"title": ""} for record in make_records(COUNT)]
    records[-1]["text"] *= 4
    corpus = write_jsonl(tmp_path / "corpus.jsonl", records)
    document = checkpoint_spec(qwen3, dimension=DIMENSION)
    pair = write_pair(tmp_path / "tiny.toml", query, document)
    indexes = tmp_path / "indexes"
    command = [sys.executable, "-m", "care", "index", str(corpus), "--backend", "vllm"]
    command += ["--index", "tiny", "--pair", str(pair)]
    command += ["--indexes", str(indexes), "--builds", str(tmp_path / "builds")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    # Standard output has only the summary.
    assert [line[:7].strip() for line in done.stdout.splitlines()] == [
        "corpus",
        "",  # one text was cut: chunks are suggested
        "encode",
        "index",
        "total",
        "active",
    ]
    manifest = read_manifest(indexes / "tiny" / IndexFolder(indexes, "tiny").active())
    assert manifest.encoder == document
    assert (manifest.count, manifest.corpus.truncated) == (COUNT, 1)
    assert manifest.corpus.tokens < COUNT * MAX_LENGTH

    with running_service(indexes, "tiny", str(pair)) as service:
        for record in records[:-1:7]:
            first, second = search(service.url, record["text"])[:2]
            assert first["id"] == record["_id"]
            assert first["score"] == pytest.approx(1, abs=1e-4)
            assert second["score"] < 0.9999
