"""From checkpoints to ONNX, merged checkpoints and models of sentence-transformers."""
