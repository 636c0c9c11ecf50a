"""Encoders in ONNX Runtime, transformers, vLLM or on an embedding server, and their factory."""
