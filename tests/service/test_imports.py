import subprocess
import sys

import pytest

# Redis's client is loaded where a Redis is configured: it slows every start.
FORBIDDEN = ("torch", "transformers", "vllm", "indexer", "tqdm", "onnx", "redis")


@pytest.mark.e2e
def test_the_application_does_not_import_optional_libraries() -> None:
    code = f"import service.app, sys; print(*sorted(set({FORBIDDEN}) & set(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout == "\n"
