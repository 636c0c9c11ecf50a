from pathlib import Path
from typing import Any

import pytest

from core.errors import IndexVersionError
from core.manifest import TERMS
from core.terms import TermList
from core.verification import verify_files
from core.versions import read_manifest
from stores.lexical import LexicalIndex, open_full_text
from stores.term_list import GIVEN, USED, read_terms
from tests.conftest import Builder
from tests.errors import raises

TEXTS = "腹泻的治疗 小儿腹泻 腹泻脱水 便秘的治疗 失眠的治疗 感冒了怎么办 上呼吸道感染"
RECORDS = [{"_id": str(i), "text": text} for i, text in enumerate(TEXTS.split())]
# The documents say 感冒 as often as its term, so searches do not need that row.
GIVEN_TERMS = TermList({"拉肚子": ("腹泻",), "感冒": ("上呼吸道感染",)})


@pytest.fixture
def folder(build_version: Builder, tmp_path: Path) -> Path:
    manifest = build_version(RECORDS, terms=GIVEN_TERMS)
    return tmp_path / "indexes" / "test" / manifest.version


def opened(folder: Path) -> LexicalIndex:
    index = open_full_text(folder, read_manifest(folder))
    assert index
    return index


def found(folder: Path, query: str) -> dict[str, float]:
    scores, rows = opened(folder).search(query, 10)
    return dict(zip(map(str, rows.tolist()), scores.tolist(), strict=True))


def test_a_search_finds_what_a_word_means(
    folder: Path, build_version: Builder, tmp_path: Path
) -> None:
    hits = found(folder, "拉肚子")
    assert hits.keys() == {"0", "1", "2"}
    assert all(0 < score <= 1 for score in hits.values())
    without = tmp_path / "indexes" / "test" / build_version(RECORDS).version
    assert found(without, "拉肚子") == {}
    assert found(folder, "便秘") == found(without, "便秘")


def test_what_a_word_means_counts_in_the_idf_of_a_query(
    folder: Path, build_version: Builder, tmp_path: Path
) -> None:
    index = opened(folder)
    # No document has 拉肚子; its term has the weight that it has in a search.
    assert index.idf("拉肚子") == pytest.approx(index.idf("腹泻") / 2)
    without = opened(tmp_path / "indexes" / "test" / build_version(RECORDS).version)
    assert without.idf("拉肚子") == 0
    assert index.idf("便秘的治疗") == without.idf("便秘的治疗") > 0


def test_both_lists_are_parts_of_the_version(folder: Path) -> None:
    manifest = read_manifest(folder)
    assert read_terms(folder, manifest, GIVEN) == GIVEN_TERMS
    assert read_terms(folder, manifest, USED) == TermList({"拉肚子": ("腹泻",)})
    assert manifest.components[TERMS].settings == {"given": 2, "used": 1}
    (folder / USED).write_text("拉肚子\t便秘\n", encoding="utf-8")
    with raises(IndexVersionError, "wrong_checksum"):
        verify_files(folder, manifest)


def test_a_list_of_another_format_is_an_error(folder: Path) -> None:
    manifest: Any = read_manifest(folder)
    component = manifest.components[TERMS].model_copy(update={"format": 2})
    later = manifest.model_copy(update={"components": {TERMS: component}})
    with raises(IndexVersionError, "unreadable_terms"):
        read_terms(folder, later, USED)
