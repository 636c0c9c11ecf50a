import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from core.analysis import terms
from core.documents import FILE_NAME, DocumentReader
from core.errors import CareError, IndexVersionError
from core.filters import FilterReader, Selection
from core.manifest import FULL_TEXT, IndexManifest
from core.terms import TermList
from core.text import document_text
from core.types import Document
from core.versions import IndexFolder, read_manifest
from stores import lexical
from stores.lexical import LexicalIndex, Part, open_full_text
from tests.conftest import Builder, make_records
from tests.core.test_analysis import SPELLINGS, folded
from tests.errors import raises

K1, B = 1.2, 0.75


@pytest.fixture
def records() -> list[dict[str, Any]]:
    records = make_records(60)
    for number, record in enumerate(records):
        record["metadata"]["year"] = 2000 + number % 7
    return records


@pytest.fixture
def folder(build_version: Builder, records: list[dict[str, Any]], tmp_path: Path) -> Path:
    return tmp_path / "indexes" / "test" / build_version(records).version


def opened(folder: Path) -> tuple[LexicalIndex, FilterReader, list[Document]]:
    manifest = read_manifest(folder)
    filters = FilterReader(folder / "filters.arrow", manifest.filter_fields, manifest.count)
    index = open_full_text(folder, manifest)
    assert index
    return index, filters, list(DocumentReader(folder / FILE_NAME))


def bm25(documents: list[Document], query: str, *, characters: bool = True) -> list[float]:
    """Computes the scores by definition, divided by the highest one that is possible."""
    counts = [Counter(terms(document_text(d.title, d.text))) for d in documents]
    lengths = [sum(count.values()) for count in counts]
    mean = sum(lengths) / len(lengths)
    wanted = set(terms(query, characters=characters))
    having = {term: sum(term in count for count in counts) for term in wanted}
    idf = {
        term: math.log(1 + (len(documents) - n + 0.5) / (n + 0.5))
        for term, n in having.items()
        if n
    }
    highest = (K1 + 1) * sum(idf.values())
    return [
        sum(
            idf[t] * count[t] * (K1 + 1) / (count[t] + K1 * (1 - B + B * length / mean))
            for t in idf
        )
        / highest
        for count, length in zip(counts, lengths, strict=True)
    ]


@pytest.mark.parametrize("characters", [True, False])
def test_scores_are_those_of_bm25(build_version: Builder, tmp_path: Path, characters: bool) -> None:
    # Up to 40 terms, a document's length is stored exactly.
    texts = ["胃痛", "胃痛反酸", "反酸烧心怎么办", "头痛", "胃痛胃痛胃痛", "5mg/kg"]
    records = [{"_id": str(i), "text": text} for i, text in enumerate(texts)]
    index, _, documents = opened(tmp_path / "indexes/test" / build_version(records).version)
    scores, rows = index.search("胃痛反酸", 10, characters=characters)
    expected = bm25(documents, "胃痛反酸", characters=characters)
    if not characters:
        expected[1] += lexical.WHOLE  # it has all words of the query
    assert {row: round(expected[row], 5) for row in range(6) if expected[row]} == {
        row: round(score, 5) for row, score in zip(rows.tolist(), scores.tolist(), strict=True)
    }
    assert scores.tolist() == sorted(scores.tolist(), reverse=True)
    assert 0 < scores[0] <= 1 + lexical.WHOLE


@pytest.mark.parametrize(
    ("query", "whole"),
    [
        ("心梗", {0, 1}),
        ("心梗 饮食", {1}),
        ("饮食 心肌梗死", {1}),
        ("心梗饮食", {1}),
        ("心率", {2}),
        ("Hp阳性", {3, 4}),
        ("HP", {3, 4}),
        ("心梗 头痛", set()),
        ("心肌", {1, 2}),
        ("心梗以后的饮食和普通人的有什么不同", set()),
    ],
)
def test_passages_with_all_words_of_a_short_query_are_first(
    build_version: Builder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    query: str,
    whole: set[int],
) -> None:
    monkeypatch.setattr(lexical, "WHOLE", 2.0)
    texts = [
        "心梗",
        f"急性心肌梗死，{'尽快送医院。' * 30}饮食清淡。",
        f"{'心率快。' * 9}普萘洛尔使心肌耗氧减少",
        "呼气试验hp阳性",
        f"幽门螺杆菌感染{'要用四种药。' * 30}",
        "乙肝表面抗原阳性，HPV阳性",
    ]
    records = [{"_id": str(i), "text": text} for i, text in enumerate(texts)]
    folder = tmp_path / "indexes/test" / build_version(records).version
    component = read_manifest(folder).components[FULL_TEXT]
    words = {"心梗": ("心肌梗死",), "hp": ("幽门螺杆菌",), "hp阳性": ("幽门螺杆菌感染",)}
    index = LexicalIndex([Part(folder, component, len(texts))], TermList(words))
    scores, rows = index.search(query, 10, characters=False)
    assert set(rows[scores > 1].tolist()) == whole
    assert set(rows[: len(whole)].tolist()) == whole
    assert index.search(query, 10)[0].max() <= 1


@pytest.mark.parametrize("characters", [True, False])
@pytest.mark.parametrize("spellings", [group for group in SPELLINGS if "Hpylori" not in group])
def test_all_spellings_of_a_name_are_found_and_the_same_one_first(
    build_version: Builder, tmp_path: Path, spellings: Sequence[str], characters: bool
) -> None:
    # So long that the lengths of documents that differ by a few terms are stored as the same.
    texts = [f"检查{name}，{'结果正常。' * 50}" for name in spellings]
    texts += [f"检查{other}，{'结果正常。' * 50}" for other in ("CA", "38.5", "mg")]
    records = [{"_id": str(i), "text": text} for i, text in enumerate(texts)]
    index, _, _ = opened(tmp_path / "indexes/test" / build_version(records).version)
    for name in spellings:
        scores, rows = index.search(name, len(spellings), characters=characters)
        assert set(rows[: len(spellings)].tolist()) == set(range(len(spellings)))
        best = {row for row, score in zip(rows.tolist(), scores, strict=True) if score == scores[0]}
        assert all(folded(name) in folded(spellings[each]) for each in best)


def test_the_best_rows_are_returned(folder: Path) -> None:
    index, _, documents = opened(folder)
    scores, rows = index.search("糖尿病患者第7号", 5)
    # Those with the score of the last one are returned as well.
    assert len(rows) > 5
    assert np.allclose(scores[4:], scores[4], atol=1e-6)
    assert "第7号" in documents[rows[0]].text
    assert rows.dtype == np.int64
    assert scores.dtype == np.float32


@pytest.mark.parametrize("query", ["，。！", "龘", "xyz"])
def test_a_query_without_a_known_term_has_no_hits(folder: Path, query: str) -> None:
    scores, rows = opened(folder)[0].search(query, 5)
    assert (len(scores), len(rows)) == (0, 0)


@pytest.mark.parametrize(
    "filter_",
    [
        {"department": ["儿科"]},
        {"department": ["儿科", "骨科"], "tags": ["组1"]},
        {"department": {"not": ["儿科"]}},
        {"rare": [True]},
        {"year": {"gte": 2003, "lt": 2006}},
        {"year": {"gt": 3000}},
    ],
)
def test_filters_are_exact(folder: Path, filter_: Mapping[str, Any]) -> None:
    index, filters, _ = opened(folder)
    selection = Selection(filters, filters.check(filter_))
    every = dict(zip(*reversed([a.tolist() for a in index.search("患者护理", 60)]), strict=True))
    scores, rows = index.search("患者护理", 60, selection)
    found = dict(zip(rows.tolist(), scores.tolist(), strict=True))
    assert found == {row: every[row] for row in selection.rows().tolist()}


def test_a_check_stops_the_search(folder: Path) -> None:
    def stop() -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        opened(folder)[0].search("患者", 5, check=stop)


def test_a_version_can_be_read_where_nothing_can_be_written(folder: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    index, _, _ = opened(folder)
    assert len(index.search("患者", 5)[1]) >= 5
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
    for path in (folder / FULL_TEXT).iterdir():
        assert path.stat().st_mode & 0o044 == 0o044


def test_equal_documents_have_equal_files(build_version: Builder) -> None:
    first, second = (build_version(make_records(30)).components[FULL_TEXT] for _ in range(2))
    assert first == second


def test_a_temporary_file_of_a_late_thread_is_no_part_of_a_version(
    build_version: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = lexical._rename_segments

    def rename_late(target: Path) -> None:
        rename(target)
        (target / ".tmpA1b2C3").touch()

    monkeypatch.setattr(lexical, "_rename_segments", rename_late)
    files = build_version(make_records(3)).components[FULL_TEXT].files
    assert files and not any("/." in name for name in files)


def test_a_version_without_full_text_has_none(build_version: Builder, tmp_path: Path) -> None:
    manifest = build_version(make_records(10), full_text=False)
    folder = tmp_path / "indexes" / "test" / manifest.version
    assert open_full_text(folder, manifest) is None
    assert not (folder / FULL_TEXT).exists()
    assert manifest.fusion == {}


def test_files_that_cannot_be_written_are_an_error_that_names_them(
    build_version: Builder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = build_version(make_records(10))
    monkeypatch.setattr("stores.lexical._HEAP", 1)  # Tantivy refuses so little
    with raises(CareError, "input_output"):
        build_version(make_records(20))
    assert IndexFolder(tmp_path / "indexes", "test").active() == before.version


def _damaged(folder: Path, manifest: IndexManifest) -> IndexManifest:
    (folder / FULL_TEXT / "meta.json").write_text("{}")
    return manifest


def _of_another_format(_: Path, manifest: IndexManifest) -> IndexManifest:
    component = manifest.components[FULL_TEXT].model_copy(update={"format": 2})
    return manifest.model_copy(update={"components": {FULL_TEXT: component}})


def _of_fewer_rows(_: Path, manifest: IndexManifest) -> IndexManifest:
    return manifest.model_copy(update={"count": 59})


@pytest.mark.parametrize("change", [_damaged, _of_another_format, _of_fewer_rows])
def test_files_that_do_not_match_are_an_error(folder: Path, change: Any) -> None:
    manifest = read_manifest(folder)
    with raises(IndexVersionError, "unreadable_full_text"):
        open_full_text(folder, change(folder, manifest))
