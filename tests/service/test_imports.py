import subprocess
import sys

FORBIDDEN = ("torch", "transformers", "vllm", "indexer", "tqdm", "onnx")


def test_the_application_loads_no_training_library_and_nothing_of_the_other_plane() -> None:
    code = f"import service.app, sys; print(*sorted(set({FORBIDDEN}) & set(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout == "\n"
