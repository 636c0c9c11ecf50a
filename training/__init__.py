"""Training of encoder pairs from recipes: initial checkpoints, stages, losses and results."""

import os

# ONNX Runtime sends usage events to its vendor unless this is set before it is first imported.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
