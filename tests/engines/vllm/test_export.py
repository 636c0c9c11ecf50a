"""vLLM with an exported document encoder with merged LoRA layers."""

from pathlib import Path

from transformers import AutoModel, AutoTokenizer

from core.encoders import Pair
from models.encoders.transformers import TransformersEncoder
from models.encoders.vllm import VllmEncoder
from models.pairs import load_pair
from tests.checkpoints import LONG, TEXTS, checkpoint_spec, write_adapter, write_qwen3
from training.export.checkpoint import export_document_side


def test_vllm_reads_a_merged_document_encoder(tmp_path: Path) -> None:
    base = write_qwen3(tmp_path / "base", ends_texts=False)
    write_adapter(base, tmp_path / "lora", AutoModel, "FEATURE_EXTRACTION")
    query = load_pair("care-mini").query
    spec = checkpoint_spec(base, adapter="lora", prompt="文档：")
    pair = Pair(name="tiny", description="d", folder=tmp_path, query=query, document=spec)
    texts = [*TEXTS, LONG]
    expected = TransformersEncoder(spec, tmp_path, device="cpu").encode(texts).vectors
    merged, cosine = export_document_side(pair, "merged", tmp_path / "merged", texts)
    assert cosine >= 0.9999
    # Other tokenizer libraries append the same end token.
    assert AutoTokenizer.from_pretrained(tmp_path / "merged")("头痛").input_ids[-1] == 1
    encoder = VllmEncoder(merged, Path())
    try:
        vectors = encoder.encode(texts).vectors
    finally:
        encoder.close()
    assert (vectors * expected).sum(axis=1).min() >= 0.9999
