import subprocess
import sys
from pathlib import Path

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


@pytest.mark.e2e
def test_building_and_searching_an_index_do_not_import_pandas(tmp_path: Path) -> None:
    """Its import takes half a second of each command, where it is installed."""
    documents = [{"_id": f"{i}", "text": f"骨折{i}", "metadata": {"year": i}} for i in range(20)]
    code = f"""if True:
        import sys, care
        folders = {{"indexes": {str(tmp_path / "indexes")!r}}}
        care.build_index("test", {documents!r}, builds={str(tmp_path / "builds")!r}, **folders)
        with care.open_index("test", **folders) as index:
            found = index.search("骨折", filter={{"year": {{"gte": 12}}}})
        print(len(found), "pandas" in sys.modules)
    """
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout == "8 False\n"
