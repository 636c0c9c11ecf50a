"""Names that options of commands accept, and defaults; importing them loads no library."""

from pathlib import Path
from typing import Literal

Backend = Literal["auto", "onnx", "openvino", "transformers", "vllm", "openai"]
Dtype = Literal["auto", "float32", "bfloat16", "float16", "int8"]
StoreName = Literal["faiss", "milvus"]
# How a query finds documents: by vectors, by full text, or by both.
Mode = Literal["dense", "lexical", "hybrid"]
SearchDevice = Literal["cpu", "cuda", "cuda-fp16"]
# How a token vector is stored (models/late_interaction.py).
Codec = Literal["fp16", "int8", "2bit", "1bit"]
# What `care export` computes a query encoder in.
ExportPrecision = Literal["fp32", "fp16", "int8", "tensorrt"]

DEFAULT_PAIR = "care-mini"
DEFAULT_INDEXES = Path("indexes")
DEFAULT_BUILDS = Path("builds")
DEFAULT_PAIRS = Path("pairs")
# Most characters of a query (CARE_MAX_QUERY_CHARS).
DEFAULT_QUERY_CHARS = 2000
