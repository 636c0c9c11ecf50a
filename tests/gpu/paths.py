"""The paths on GPUs and the environment of each."""

from typing import NamedTuple


class Environment(NamedTuple):
    """The folder of an environment, and what makes it."""

    folder: str
    made_by: str


_TEST = Environment(".venv-test", "make test")
# vLLM has one build for processors and one for GPUs.
_ON_CPU = Environment(".venv-engines", "make test-engines")
_ON_GPU = Environment(".venv-vllm", "see 'Install for GPUs' in docs/scale-out.md")

NAMES = (
    "onnxruntime-cuda",
    "onnxruntime-tensorrt",
    "faiss-build",
    "faiss-search",
    "transformers",
    "fsdp2",
    "vllm",
)


def environment(name: str, *, on_gpu: bool) -> Environment:
    """Returns the environment in which a path is checked."""
    if name != "vllm":
        return _TEST
    return _ON_GPU if on_gpu else _ON_CPU
