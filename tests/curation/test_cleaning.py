from pathlib import Path

import pytest

from core.records import read_jsonl
from core.types import Document
from curation.cleaning import (
    Cleaner,
    anonymize,
    clean,
    clean_documents,
    clean_queries,
    clean_texts,
)
from evaluation.beir import read_documents, read_queries
from tests.conftest import write_jsonl
from tests.curation.raw_sample import RAW


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("请打13812345678，谢谢", "请打<tel>，谢谢"),
        ("座机0571-88888888。", "座机<tel>。"),
        ("身份证号330106198803251234。", "身份证号<id>。"),
        ("加QQ123456789问", "加QQ<qq>问"),
        ("邮箱a.b@qq.com。", "邮箱<email>。"),
        ("a.b@qq.com", "<email>"),
        ("见http://www.x.com/a 。", "见<url> 。"),
        ("微信号：zhang_san88，", "微信号：<wechat>，"),
        ("加V：zhang_san88", "加V：<wechat>"),
        ("您好，我叫张伟，今年30岁", "您好，我叫<name>，今年30岁"),
        # A phone number is recognised in a text that contains QQ.
        ("电话13812345678，QQ：123456789。", "电话<tel>，QQ：<qq>。"),
    ],
)
def test_personal_data_are_replaced(text: str, expected: str) -> None:
    assert anonymize(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "血小板150，白细胞6.8.5.1，血压120-80，HBV DNA 2.6×10^6",
        "乙肝DNA定量123456789拷贝",
        "服用阿司匹林100mg每天1次，共20121113天",
        "我叫不出名字的药",
    ],
)
def test_medical_values_are_kept(text: str) -> None:
    assert anonymize(text) == text


def test_html_is_removed_and_signs_are_kept() -> None:
    assert clean("<p>胆红素&gt;17.1，WBC<4.0</p>", anonymous=False) == "胆红素>17.1，WBC<4.0"


def test_escaped_tags_are_removed_and_comparisons_are_kept() -> None:
    assert clean("&lt;p&gt;复查&lt;br/&gt;肝功能&lt;/p&gt;", anonymous=False) == "复查 肝功能"
    assert clean("ALT&lt;AST，TBIL&gt;17.1", anonymous=False) == "ALT<AST，TBIL>17.1"


def test_full_width_digits_and_letters_are_made_half_width() -> None:
    assert clean("ＣＴ，血糖６．８％！", anonymous=False) == "CT，血糖6.8%！"
    # A phone number in full-width digits is personal data too.
    assert clean("电话：０１０－８８８８８８８８", anonymous=True) == "电话：<tel>"
    queries = {"wide": "ＭＲＩ前要注意什么", "narrow": "MRI前要注意什么"}
    assert list(clean_queries(queries, Cleaner((4, 25), anonymous=True))) == ["wide"]


def test_queries_are_filtered_and_counted() -> None:
    queries = {
        "short": "痛",
        "long": "痛" * 30,
        "first": "头痛  怎么办？",
        "again": "头痛 怎么办？",
        "phone": "头痛，电话13812345678，回我",
    }
    cleaner = Cleaner((4, 25), anonymous=True)
    kept = clean_queries(queries, cleaner)
    assert kept == {"first": "头痛 怎么办？", "phone": "头痛，电话<tel>，回我"}
    assert cleaner.counts == {
        "kept": 2,
        "too_short": 1,
        "too_long": 1,
        "duplicate": 1,
        "anonymized": 1,
    }


def test_documents_keep_title_and_metadata() -> None:
    document = Document("d", "<b>头痛</b>的时候多休息", "头痛<br>", {"department": "内科"})
    (cleaned,) = clean_documents([document], Cleaner((4, 25), anonymous=True))
    assert cleaned == Document("d", "头痛 的时候多休息", "头痛", {"department": "内科"})


def test_cleaning_twice_is_cleaning_once() -> None:
    raw = "<p>我叫王小明</p>，电话13812345678，邮箱 a@b.cn，见 http://a.cn/b"
    once = clean(raw, anonymous=True)
    assert all(token in once for token in ("<name>", "<tel>", "<email>", "<url>"))
    assert clean(once, anonymous=True) == once


def test_questions_of_the_benchmark_are_in_no_other_file(tmp_path: Path) -> None:
    report = clean_texts(RAW / "queries.jsonl", RAW / "corpus.jsonl", tmp_path, benchmark=70)
    apart, queries = (
        read_queries(tmp_path / "cleaned" / f"{name}.jsonl") for name in ("benchmark", "queries")
    )
    assert (len(apart), len(queries)) == (report["benchmark"], report["queries"]) == (70, 97)
    assert set(apart.values()).isdisjoint(queries.values())
    pairs = [record for _, record in read_jsonl(tmp_path / "pairs.jsonl")]
    assert {pair["title"] for pair in pairs} <= set(queries.values())
    answers = {d.id: d.text for d in read_documents(RAW / "corpus.jsonl")}
    ids = {text: id_ for id_, text in queries.items()}
    for pair in pairs:
        assert pair["text"] == clean(answers[ids[pair["title"]]], anonymous=True)
    # Answers to questions of the benchmark stay in the corpus.
    assert len(read_documents(tmp_path / "cleaned" / "corpus.jsonl")) == 167
    before = (tmp_path / "cleaned" / "benchmark.jsonl").read_bytes()
    clean_texts(RAW / "queries.jsonl", RAW / "corpus.jsonl", tmp_path, benchmark=70, seed=1)
    assert (tmp_path / "cleaned" / "benchmark.jsonl").read_bytes() != before


def test_a_document_is_paired_with_its_title(tmp_path: Path) -> None:
    corpus = [
        {"_id": "a", "title": "<b>高血压怎么办</b>", "text": "按时吃药，少吃盐，多量血压。"},
        {"_id": "b", "text": "没有标题，也没有问题的一段话。"},
        {"_id": "c", "title": "骨折怎么办", "text": "按时吃药，少吃盐，多量血压。"},
    ]
    queries = [{"_id": "q", "text": "头痛怎么办"}]
    files = (
        write_jsonl(tmp_path / name, rows)
        for name, rows in (("q.jsonl", queries), ("c.jsonl", corpus))
    )
    report = clean_texts(*files, tmp_path / "out")
    pairs = [record for _, record in read_jsonl(tmp_path / "out" / "pairs.jsonl")]
    assert pairs == [{"title": "高血压怎么办", "text": "按时吃药，少吃盐，多量血压。"}]
    assert report["cleaning"]["documents"]["duplicate"] == 1
