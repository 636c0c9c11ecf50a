"""Equal texts are found, and nearly equal ones counted."""

import json
import random
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer import duplicates
from indexer.duplicates import (
    DIGEST,
    SIGNATURE,
    Signatures,
    count_near_duplicates,
    digest,
    first_occurrences,
    inverse_indices,
    signature,
    unique_positions,
)
from tests.conftest import Builder

TEXT = (
    "高血压患者应限制食盐，每天不超过五克，多吃新鲜蔬菜和水果，少吃腌制食品和肥肉。"
    "规律服用降压药，不要自行停药或减量；每周测量血压两到三次，并记录下来给医生看。"
    "适当运动，如快走、游泳，每次三十分钟以上；戒烟限酒，保持心情平和，避免过度劳累。"
)
# Characters of other texts.
LETTERS = "发热咳嗽头痛腹泻失眠皮疹骨折糖尿病胃炎肺结核心脏肝肾儿童老人孕妇"


@pytest.fixture(scope="module", autouse=True)
def small_blocks() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(duplicates, "_BLOCK", 4)
        yield


@given(st.lists(st.integers(0, 30), max_size=60))
def test_equal_digests_are_found_in_all_partitions(values: list[int]) -> None:
    first_of: dict[int, int] = {}
    wanted = [first_of.setdefault(value, place) for place, value in enumerate(values)]
    with TemporaryDirectory() as name:
        folder = Path(name)
        found = first_occurrences(np.fromiter(map(digest, map(str, values)), DIGEST), folder)
        first = unique_positions(found, folder)
        which = inverse_indices(found, first, folder)
    assert found.tolist() == wanted
    assert first.tolist() == list(first_of.values())
    assert first[which].tolist() == wanted


def test_digests_with_a_common_prefix_or_suffix_differ(tmp_path: Path) -> None:
    same = b"\x07" * 15
    values = [same + b"\x00", same + b"\x01", b"\x01" + same, same + b"\x00"]
    array = np.array(values, DIGEST)
    assert first_occurrences(array, tmp_path).tolist() == [0, 1, 2, 0]


def test_results_are_memory_mapped(tmp_path: Path) -> None:
    found = first_occurrences(np.fromiter(map(digest, map(str, range(50))), DIGEST), tmp_path)
    first = unique_positions(found, tmp_path)
    for array in (found, first, inverse_indices(found, first, tmp_path)):
        base = array
        while isinstance(base.base, np.ndarray):
            base = base.base
        assert isinstance(base, np.memmap)


def signatures(*texts: str) -> Signatures:
    made = np.stack([signature(text) for text in texts])
    assert made.dtype == SIGNATURE.base and made.shape == (len(texts), *SIGNATURE.shape)
    return made


def others(count: int, seed: int = 0) -> list[str]:
    chosen = random.Random(seed)
    return ["".join(chosen.choices(LETTERS, k=120)) for _ in range(count)]


@pytest.mark.parametrize(
    "other",
    [
        TEXT.replace("，", ","),
        TEXT.replace("。", "。\n"),
        TEXT + "祝您健康。",
        TEXT.replace("五克", "六克"),
        "  " + TEXT,
    ],
)
def test_small_changes_leave_texts_nearly_equal(other: str) -> None:
    assert count_near_duplicates(signatures(*others(50), TEXT, *others(50, 1), other)) == 1


def test_different_texts_are_not_nearly_equal() -> None:
    half = TEXT[: len(TEXT) // 2]
    assert count_near_duplicates(signatures(TEXT, half, *others(500))) == 0


@pytest.mark.parametrize("text", ["", "。", "a", "咳嗽"])
def test_short_texts_have_signatures(text: str) -> None:
    assert count_near_duplicates(signatures(text, TEXT)) == 0


def test_each_copy_is_counted_once() -> None:
    assert count_near_duplicates(np.zeros((0, 16), np.uint32)) == 0
    copies = [TEXT + tail for tail in ("祝好。", "谢谢。", "请遵医嘱。")]
    assert count_near_duplicates(signatures(TEXT, *copies)) == 3


def test_a_build_counts_them_beside_equal_texts(tmp_path: Path, build_version: Builder) -> None:
    texts = [TEXT, TEXT, TEXT + "祝您健康。", *others(20)]
    records = [{"_id": str(i), "text": text} for i, text in enumerate(texts)]
    build_version(records)
    (summary,) = (tmp_path / "builds").rglob("corpus.json")
    counted = json.loads(summary.read_text())
    names = ("documents", "unique_texts", "near_duplicates")
    assert [counted[name] for name in names] == [23, 22, 1]
