import subprocess
import sys
from pathlib import Path

import pytest

from core import documents, filters
from tests.conftest import Builder, make_records

# Redis's client is loaded where a Redis is configured: it slows every start.
FORBIDDEN = ("torch", "transformers", "vllm", "indexer", "tqdm", "onnx", "redis")


@pytest.mark.e2e
def test_the_application_does_not_import_optional_libraries() -> None:
    code = f"import service.app, sys; print(*sorted(set({FORBIDDEN}) & set(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout == "\n"


@pytest.mark.e2e
def test_opening_a_version_does_not_import_pandas(build_version: Builder, tmp_path: Path) -> None:
    manifest = build_version(make_records(60))
    folder = tmp_path / "indexes" / "test" / manifest.version
    code = (
        "import sys; from core.documents import DocumentReader;"
        "from core.filters import FilterReader;"
        f"DocumentReader({str(folder / documents.FILE_NAME)!r});"
        f"FilterReader({str(folder / filters.FILE_NAME)!r}, {manifest.filter_fields!r}, 60);"
        "print('pandas' in sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout == "False\n"
