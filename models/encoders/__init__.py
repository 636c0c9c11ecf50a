"""Texts to vectors: by ONNX Runtime, transformers, vLLM or a server; one factory makes them."""
