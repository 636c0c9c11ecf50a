"""The paths on GPUs and the environment of each."""

TEST, ENGINES = ".venv-test", ".venv-engines"

PATHS = {
    "onnxruntime-cuda": TEST,
    "onnxruntime-tensorrt": TEST,
    "faiss-build": TEST,
    "faiss-search": TEST,
    "transformers": TEST,
    "fsdp2": TEST,
    "vllm": ENGINES,
}
