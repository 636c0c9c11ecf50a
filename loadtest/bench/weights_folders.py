"""The folders that `loadtest.bench.weights` writes."""

TORCH, ONNX_FP32, ONNX_INT8 = "sentence-transformers", "onnx-fp32", "onnx-int8"
