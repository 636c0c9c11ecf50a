"""Export of checkpoints to ONNX, merged checkpoints and sentence-transformers models."""
