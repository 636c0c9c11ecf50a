"""The folders that `loadtest.bench.weights` writes."""

TORCH, ONNX_FP32, ONNX_INT8 = "e5-small", "onnx-fp32", "onnx-int8"
