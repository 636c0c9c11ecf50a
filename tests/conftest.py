import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from core.manifest import IndexManifest
from indexer.build import BuildOptions, build
from service.app import create_app
from service.settings import Settings
from tests.encoders import BigramEncoder

# The key "secret", as an administrator's.
ADMIN_KEY = f"ops:admin:{hashlib.sha256(b'secret').hexdigest()}"
# The key "asks", as a client's.
SEARCH_KEY = f"app:search:{hashlib.sha256(b'asks').hexdigest()}"
DEPARTMENTS = ("心血管科", "儿科", "骨科")
SUBJECTS = ("高血压", "发热", "骨折", "咳嗽", "失眠", "腹泻", "头痛", "皮疹", "贫血", "便秘")


def make_records(count: int) -> list[dict[str, Any]]:
    """Records whose texts differ, over three departments, with a rare and a broad field."""
    return [
        {
            "_id": f"d{i:04d}",
            "title": f"{SUBJECTS[i % len(SUBJECTS)]}第{i}讲",
            "text": f"{SUBJECTS[i % len(SUBJECTS)]}患者第{i}号的护理要点，编号{i * 7919 % 10007}。",
            "metadata": {
                "department": DEPARTMENTS[i % len(DEPARTMENTS)],
                "rare": i == count // 2,
                "tags": ["门诊", f"组{i % 5}"],
            },
        }
        for i in range(count)
    ]


def write_jsonl(path: Path, records: Sequence[Mapping[str, Any]]) -> Path:
    lines = (json.dumps(record, ensure_ascii=False) for record in records)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


Builder = Callable[..., IndexManifest]


@pytest.fixture
def build_version(tmp_path: Path) -> Builder:
    """Builds a version of index 'test' under `tmp_path / indexes` with the test encoder."""

    def run(records: Sequence[Mapping[str, Any]], **options: Any) -> IndexManifest:
        corpus = write_jsonl(tmp_path / "corpus.jsonl", records)
        space = options.pop("space", "bigrams-1")
        settings = {
            "corpus": str(corpus),
            "name": "test",
            "indexes": tmp_path / "indexes",
            "builds": tmp_path / "builds",
            "shard_size": 16,
            "batch_size": 4,
            "progress": False,
        }
        manifest, _ = build(
            BuildOptions(**(settings | options)),
            BigramEncoder("document", space),
            BigramEncoder("query", space),
        )
        return manifest

    return run


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(
        indexes=tmp_path / "indexes",
        index="test",
        threads=1,
    )


@pytest.fixture
def client(build_version: Builder, settings: Settings) -> Iterator[TestClient]:
    """The real application over 60 documents, with the test encoder."""
    build_version(make_records(60))
    with TestClient(create_app(settings, BigramEncoder()), raise_server_exceptions=False) as client:
        yield client
