"""Texts that are nearly equal are counted, and others are not."""

import json
import random
from pathlib import Path

import numpy as np
import pytest

from indexer.build import BuildOptions, build
from indexer.near_duplicates import SIGNATURE, Signatures, count_near_duplicates, signature
from tests.conftest import write_jsonl
from tests.encoders import BigramEncoder

TEXT = (
    "高血压患者应限制食盐，每天不超过五克，多吃新鲜蔬菜和水果，少吃腌制食品和肥肉。"
    "规律服用降压药，不要自行停药或减量；每周测量血压两到三次，并记录下来给医生看。"
    "适当运动，如快走、游泳，每次三十分钟以上；戒烟限酒，保持心情平和，避免过度劳累。"
)
# Characters of other texts.
LETTERS = "发热咳嗽头痛腹泻失眠皮疹骨折糖尿病胃炎肺结核心脏肝肾儿童老人孕妇"


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


def test_no_text_has_no_near_duplicate() -> None:
    assert count_near_duplicates(np.zeros((0, 16), np.uint32)) == 0


def test_each_copy_is_counted_once() -> None:
    copies = [TEXT + tail for tail in ("祝好。", "谢谢。", "请遵医嘱。")]
    assert count_near_duplicates(signatures(TEXT, *copies)) == 3


def test_a_build_counts_them_beside_equal_texts(tmp_path: Path) -> None:
    texts = [TEXT, TEXT, TEXT + "祝您健康。", *others(20)]
    records = [{"_id": str(i), "text": text} for i, text in enumerate(texts)]
    options = BuildOptions(
        corpus=str(write_jsonl(tmp_path / "corpus.jsonl", records)),
        name="near",
        indexes=tmp_path / "indexes",
        builds=tmp_path / "builds",
        progress=False,
    )
    build(options, BigramEncoder("document"), BigramEncoder("query"))
    (summary,) = (tmp_path / "builds").rglob("corpus.json")
    counted = json.loads(summary.read_text())
    assert (counted["documents"], counted["unique_texts"], counted["near_duplicates"]) == (
        23,
        22,
        1,
    )
