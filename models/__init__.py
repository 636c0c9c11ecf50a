"""Encoders, the registry of encoder pairs, and the weights of the pair care-mini."""

import os

# ONNX Runtime sends usage events to its vendor unless this is set before it is first imported.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
