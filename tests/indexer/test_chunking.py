import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.encoders import EncoderSpec
from core.errors import CareError
from core.manifest import Chunking
from core.text import document_text, normalize_text
from core.types import Document
from indexer.chunking import Chunker, chunk_spans, token_starts
from indexer.records import Reject
from models.encoders.onnx import OnnxEncoder
from models.pairs import load_pair
from tests.encoders import BigramEncoder, make_spec
from tests.errors import raises

TITLE = "护理"


class PieceEncoder(BigramEncoder):
    """Tokens like subwords: parts of words with a leading space, characters, parts of them."""

    def token_offsets(self, text: str) -> list[tuple[int, int]]:
        spans = [match.span() for match in re.finditer(r"(?s)\s?[a-z]{1,3}|.", text)]
        two = [span for span in spans for _ in range(1 + (text[span[0]] > "\uffff"))]
        return [(0, 0), *two, (0, 0)]


class WordlessEncoder:
    """An encoder without token offsets."""

    spec: EncoderSpec = make_spec("document")
    encode = BigramEncoder.encode


@pytest.fixture(scope="module")
def care_mini() -> OnnxEncoder:
    pair = load_pair("care-mini")
    return OnnxEncoder(pair.document, pair.folder, threads=1)


def chunks(
    text: str, tokens: int, overlap: int = 0, title: str = "", encoder: BigramEncoder | None = None
) -> list[str]:
    chunker = Chunker(encoder or BigramEncoder(), Chunking(tokens=tokens, overlap=overlap))
    parts = chunker.split(Document("d", text, title))
    assert not isinstance(parts, Reject)
    return [part.text for part in parts]


@pytest.mark.parametrize(
    "sentences",
    [
        ["高血压。", "糖尿病！", "头痛？", "发热；", "咳嗽…", "失眠"],
        ["Rest!", "Drink?", "Sleep;", "Eat. ", "Walk"],
        ["真的吗？！！", "等等……", "好。"],
        ["他说“头痛。”", "又说『发热！』）", "（对吗？）。", "完"],
        ['He said "no."  ', "Then (he left.) ", "End."],
        ["每次3.5毫克。", "见v1.2.3版 ", "完"],
        ["第一段\n\n", "第二段\r\n\t", "第三段"],
        ["高血压。\u3000\n\u200b", "糖尿病。\n\n\ufeff\n"],
    ],
)
def test_chunks_end_at_sentence_ends(sentences: list[str]) -> None:
    longest = max(len(normalize_text(sentence)) for sentence in sentences)
    shortest_pair = min(len(normalize_text(a + b)) for a, b in pairwise(sentences))
    if shortest_pair > longest:
        assert chunks("".join(sentences), longest) == sentences
    found = chunks("".join(sentences), longest)
    ends = {len("".join(sentences[: i + 1])) for i in range(len(sentences))}
    assert {len("".join(found[: i + 1])) for i in range(len(found))} <= ends


def test_a_text_that_fits_is_one_chunk() -> None:
    chunker = Chunker(BigramEncoder(), Chunking(tokens=20))
    document = Document("d", "头痛。" * 5, TITLE, {"a": 1})
    fits = len(document_text(TITLE, document.text))
    for tokens in (fits, fits + 1):
        chunker = Chunker(BigramEncoder(), Chunking(tokens=tokens))
        assert chunker.split(document) == [
            Document("d", document.text, TITLE, {"a": 1}, parent="d", chunk=0, chunks=1)
        ]
    parts = Chunker(BigramEncoder(), Chunking(tokens=fits - 1)).split(document)
    assert isinstance(parts, list)
    assert [(p.id, p.parent, p.chunk, p.chunks) for p in parts] == [
        ("d#0", "d", 0, 2),
        ("d#1", "d", 1, 2),
    ]
    assert [(part.title, part.metadata) for part in parts] == [(TITLE, {"a": 1})] * 2


def test_each_chunk_counts_the_tokens_of_the_title() -> None:
    text = "一二三。" * 4
    assert chunks(text, 8) == ["一二三。一二三。"] * 2
    assert chunks(text, 8, title=TITLE) == ["一二三。"] * 4


def test_a_document_with_too_long_a_title_is_rejected() -> None:
    chunker = Chunker(BigramEncoder(), Chunking(tokens=10))
    parts = chunker.split(Document("d", "头痛。" * 9, "长" * 10))
    assert parts == Reject("the title is too long: no text fits into a chunk of 10 tokens")


def test_the_last_whole_sentences_are_repeated() -> None:
    text = "一。二二。三三三。四。五五五五五。六。"
    assert chunks(text, 9, 6) == [
        "一。二二。三三三。",
        "三三三。四。",
        "四。五五五五五。",
        "五五五五五。六。",
    ]
    assert chunks(text, 9, 0) == ["一。二二。三三三。", "四。五五五五五。", "六。"]


def test_a_long_sentence_is_split_between_tokens_and_not_repeated() -> None:
    text = "一。abcdefgh ijk。二。"
    encoder = PieceEncoder()
    assert chunks(text, 5, 3, encoder=encoder) == ["一。", "abcdefgh ", "ijk。", "二。"]


def test_characters_of_several_tokens_and_combining_marks_are_not_split() -> None:
    assert chunks("😀" * 4, 7, encoder=PieceEncoder()) == ["😀😀", "😀😀"]
    assert chunks("e\u0301\u0323" * 3, 3) == ["e\u0301\u0323"] * 3
    assert token_starts([(0, 0), (0, 1), (0, 1), (1, 3), (2, 3), (3, 4), (0, 0)]) == [
        *(0, 0, 1, 1, 3)
    ]


@pytest.mark.parametrize(
    ("chunking", "code", "fields"),
    [
        (Chunking(tokens=201), "chunks_too_long", {"tokens": 201, "max_length": 200}),
        (Chunking(tokens=50, overlap=50), "overlap_too_long", {"tokens": 50, "overlap": 50}),
    ],
)
def test_impossible_chunk_sizes_are_an_error(
    chunking: Chunking, code: str, fields: dict[str, int]
) -> None:
    with raises(CareError, code, **fields):
        Chunker(BigramEncoder(), chunking)


def test_an_encoder_without_token_offsets_is_an_error() -> None:
    with raises(CareError, "no_token_offsets"):
        Chunker(WordlessEncoder(), Chunking(tokens=10))


texts = st.lists(
    st.sampled_from(
        [
            *("高血压", "糖尿病患者", "头", "abcdefghij", "ab", "3.5", "e.g. ", "A"),
            *("。", "！", "？”", "…", ".", ". ", ".) ", "\n", "\r\n\r\n", " ", "\u3000", "\t"),
            *("\u200b", "\ufeff", "\u0301", "😀", "👨\u200d👩", "𠀀", "\x00", "ﬁ", "㎎"),
        ]
    ),
    min_size=1,
    max_size=120,
).map("".join)
limits = st.integers(12, 60)


def check_chunks(encoder: BigramEncoder | OnnxEncoder, text: str, limit: int, share: float) -> None:
    """Asserts the properties of the chunks of any text."""
    chunking = Chunking(tokens=limit, overlap=int(limit * share))
    document = Document("d", "头痛。" + text, TITLE)
    starts = token_starts(encoder.token_offsets(document.text))

    def count(start: int, end: int) -> int:
        return len(encoder.token_offsets(document_text(TITLE, document.text[start:end])))

    def spans() -> list[tuple[int, int]]:
        return chunk_spans(document.text, count, starts, limit=limit, overlap=chunking.overlap)

    cut = spans()
    assert cut == spans()
    assert (len(cut) == 1) == (count(0, len(document.text)) <= limit)
    assert (cut[0][0], cut[-1][1]) == (0, len(document.text))
    for start, end in cut:
        assert normalize_text(document.text[start:end])
        assert normalize_text(document.text[start]) or start == 0
        assert count(start, end) <= limit
    for (start, end), (next_start, next_end) in pairwise(cut):
        assert start < next_start <= end < next_end
        assert len([at for at in starts if next_start <= at < end]) <= chunking.overlap
    parts = Chunker(encoder, chunking).split(document)
    assert isinstance(parts, list)
    assert [part.text for part in parts] == [document.text[start:end] for start, end in cut]


@given(text=texts, limit=limits, share=st.floats(0, 0.99))
def test_chunks_of_any_text_fit_and_cover_it(text: str, limit: int, share: float) -> None:
    for encoder in (BigramEncoder(), PieceEncoder()):
        check_chunks(encoder, text, limit, share)


@given(text=texts, limit=limits, share=st.floats(0, 0.99))
def test_chunks_in_the_tokens_of_a_model_fit_and_cover_the_text(
    care_mini: OnnxEncoder, text: str, limit: int, share: float
) -> None:
    check_chunks(care_mini, text, limit, share)


@given(text=texts, starts=st.sets(st.integers(0, 400)), limit=limits)
def test_chunks_are_valid_with_wrong_estimates(text: str, starts: set[int], limit: int) -> None:
    text = "头痛。" + text
    counted = sorted({*range(0, len(text), 3), *(s for s in starts if s < len(text))})

    def count(start: int, end: int) -> int:
        return len(normalize_text(text[start:end]))

    spans = chunk_spans(text, count, counted, limit=limit, overlap=limit // 2)
    assert (spans[0][0], spans[-1][1]) == (0, len(text))
    assert all(count(*span) <= limit for span in spans)
    assert all(a[0] < b[0] <= a[1] < b[1] for a, b in pairwise(spans))


@given(
    text=st.text(alphabet="ab。", min_size=1, max_size=150).filter(lambda text: "。。" not in text),
    limit=st.integers(2, 30),
    overlap=st.integers(0, 29),
)
def test_chunks_equal_those_of_a_reference_implementation(
    text: str, limit: int, overlap: int
) -> None:
    overlap = min(overlap, limit - 1)
    assert chunks(text, limit, overlap) == [text[a:b] for a, b in by_the_rule(text, limit, overlap)]


def by_the_rule(text: str, limit: int, overlap: int) -> list[tuple[int, int]]:
    """Reference implementation: spans of chunks if each character is a token."""
    ends = {*(at + 1 for at, mark in enumerate(text) if mark == "。"), len(text)}
    spans = [(0, 0)]
    while spans[-1][1] < len(text):
        before, past = spans[-1]
        repeats = [at for at in ends if before < at < past <= at + overlap and past in ends]
        whole = [
            (begin, max(fits))
            for begin in [*sorted(repeats), past]
            if (fits := [end for end in ends if past < end <= begin + limit])
        ]
        spans.append(whole[0] if whole else (past, past + limit))
    return spans[1:] if len(text) > limit else [(0, len(text))]
