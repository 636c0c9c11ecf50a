"""Cleaning of texts: HTML, width, length, duplicates, personal data; the command `clean`."""

import contextlib
import html
import io
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

from core.progress import progress_bar
from core.records import write_json, write_jsonl
from core.text import normalize_text
from core.types import Document
from curation.common import output_folder, shuffled
from curation.config import Cleaning
from evaluation.beir import iterate_documents, read_queries, write_documents, write_queries

with contextlib.redirect_stdout(io.StringIO()):  # jionlp prints a greeting
    import jionlp

# A tag begins with a letter: "WBC<4.0" and ">10" are values. The tokens of `anonymize` are kept.
_TAG = re.compile(r"</?(?!(?:url|email|id|tel|qq|wechat|name)>)[a-zA-Z][^<>]*>")
# Tags that were escaped, as in "&lt;p&gt;". Known names only: "ALT<AST，TBIL>17" has no tag.
_ESCAPED_TAG = re.compile(
    r"</?(?:a|b|br|div|em|font|h[1-6]|hr|i|img|li|ol|p|span|strong|table|tbody|td|th|tr|u|ul)"
    r"(?:\s[^<>]*|/)?>",
    re.IGNORECASE,
)
# Full-width digits, letters and the signs of addresses; Chinese punctuation is kept.
_HALF_WIDTH = {
    ord(wide): ord(wide) - 0xFEE0 for wide in map(chr, range(0xFF01, 0xFF5F)) if wide.isalnum()
} | {ord(wide): ord(wide) - 0xFEE0 for wide in "＠－＿．／％＋"}
_WECHAT = re.compile(
    r"((?:微信号?|[vV][xX]|加[vV]|weixin|wechat)\s*[:：]?\s*)[a-zA-Z][\w-]{5,19}", re.IGNORECASE
)
_NAME = re.compile(
    r"((?:我叫|姓名\s*[:：]|我的名字[是叫])\s*)[\u4e00-\u9fff]{2,3}(?=[，。,.；;！!\s]|$)"
)


def anonymize(text: str) -> str:
    """Returns `text` with tokens such as `<tel>` in place of personal data.

    Phone and identity numbers, e-mail and web addresses, QQ and WeChat accounts, and names that
    follow words such as 我叫 are replaced. Phone and identity numbers are replaced before QQ
    numbers, which are any run of digits. Other names and places are kept: they need named-entity
    recognition. IP addresses are kept too: in medical texts most matches are rows of values.
    """
    text = jionlp.replace_url(text, token="<url>")
    # The pattern of the library needs a character before and after the address.
    text = jionlp.replace_email(f"\n{text}\n", token="<email>").strip("\n")
    text = jionlp.replace_id_card(text, token="<id>")
    text = jionlp.replace_phone_number(text, token="<tel>")
    text = jionlp.replace_qq(text, token="<qq>", strict=True)
    text = _WECHAT.sub(r"\1<wechat>", text)
    return _NAME.sub(r"\1<name>", text)


def clean(text: str, *, anonymous: bool) -> str:
    """Returns `text` normalised, without HTML, with half-width digits and letters.

    Cleaning a cleaned text again changes nothing. With `anonymous`, personal data are replaced.
    """
    text = _ESCAPED_TAG.sub(" ", html.unescape(_TAG.sub(" ", text)))
    text = normalize_text(text.translate(_HALF_WIDTH))
    return anonymize(text) if anonymous else text


class Cleaner:
    """Cleans texts one after the other and drops those that are too short, too long or duplicates.

    16 bytes of each kept text are held in memory.

    Args:
        chars: The least and the greatest number of characters.
        anonymous: Whether personal data are replaced, see `anonymize`.

    Attributes:
        counts: `kept`, `too_short`, `too_long`, `duplicate`, and `anonymized`, those among the kept
            ones in which personal data were replaced.
    """

    def __init__(self, chars: tuple[int, int], *, anonymous: bool) -> None:
        self._chars = chars
        self.anonymous = anonymous
        self._seen: set[bytes] = set()
        names = ("kept", "too_short", "too_long", "duplicate", "anonymized")
        self.counts = Counter(dict.fromkeys(names, 0))

    def __call__(self, raw: str) -> str | None:
        """Returns the cleaned text, or None if it is dropped."""
        shortest, longest = self._chars
        plain = clean(raw, anonymous=False)
        text = anonymize(plain) if self.anonymous else plain
        digest = blake2b(text.encode(), digest_size=16).digest()
        if len(text) < shortest:
            self.counts["too_short"] += 1
        elif len(text) > longest:
            self.counts["too_long"] += 1
        elif digest in self._seen:
            self.counts["duplicate"] += 1
        else:
            self._seen.add(digest)
            self.counts["kept"] += 1
            self.counts["anonymized"] += text != plain
            return text
        return None


def clean_queries(queries: Mapping[str, str], cleaner: Cleaner) -> dict[str, str]:
    cleaned = ((id_, cleaner(text)) for id_, text in queries.items())
    return {id_: text for id_, text in cleaned if text is not None}


def clean_documents(documents: Iterable[Document], cleaner: Cleaner) -> Iterator[Document]:
    """Yields the documents that are kept; length and equality ignore the title."""
    for document in documents:
        if (text := cleaner(document.text)) is not None:
            title = clean(document.title, anonymous=cleaner.anonymous)
            yield replace(document, title=title, text=text)


def clean_inputs(
    documents: Sequence[Document], queries: Mapping[str, str], options: Cleaning
) -> tuple[list[Document], dict[str, str], dict[str, dict[str, int]]]:
    """Cleans what a command reads; returns documents, queries, and the counts of both."""
    of_queries, of_documents = cleaners(options)
    kept = list(clean_documents(documents, of_documents)), clean_queries(queries, of_queries)
    counts = {"documents": dict(of_documents.counts), "queries": dict(of_queries.counts)}
    return *kept, counts


def cleaners(options: Cleaning) -> tuple[Cleaner, Cleaner]:
    """Returns the cleaners of queries and of documents."""
    anonymous = options.anonymize
    return (
        Cleaner(options.query_chars, anonymous=anonymous),
        Cleaner(options.document_chars, anonymous=anonymous),
    )


def clean_texts(
    queries: Path, corpus: Path, output: Path, *, benchmark: int = 0, seed: int = 0
) -> dict[str, Any]:
    """Cleans questions and documents, pairs them, and keeps questions apart for a benchmark.

    It is the first step from raw texts to training data.

    Writes to the folder `output`:

    - `cleaned/queries.jsonl` and `cleaned/corpus.jsonl`, to diversify and to annotate;
    - `cleaned/benchmark.jsonl`, the questions that are kept apart: no other file has them;
    - `pairs.jsonl`, `title` and `text`: each document with its title or, without a title, with the
      question of the same id.

    Questions are held in memory, documents are streamed. An interrupted call starts again.
    """
    of_queries, of_documents = cleaners(Cleaning())
    texts = clean_queries(read_queries(queries), of_queries)
    apart = set(shuffled(texts, seed, "benchmark")[:benchmark])
    with output_folder(output):
        folder = output / "cleaned"
        folder.mkdir(exist_ok=True)
        kept = folder / "corpus.jsonl"
        documents = progress_bar("clean", iterate_documents(corpus), unit="documents")
        write_documents(kept, clean_documents(documents, of_documents))
        write_jsonl(output / "pairs.jsonl", _pairs(kept, texts, {texts[id_] for id_ in apart}))
        write_queries(folder / "benchmark.jsonl", {i: t for i, t in texts.items() if i in apart})
        write_queries(folder / "queries.jsonl", {i: t for i, t in texts.items() if i not in apart})
        counts = {"queries": dict(of_queries.counts), "documents": dict(of_documents.counts)}
        report = {
            "queries": len(texts) - len(apart),
            "benchmark": len(apart),
            "documents": of_documents.counts["kept"],
            "cleaning": counts,
        }
        write_json(output / "clean.report.json", report)
    return report


def _pairs(corpus: Path, queries: Mapping[str, str], hidden: set[str]) -> Iterator[dict[str, str]]:
    for document in iterate_documents(corpus):
        title = document.title or queries.get(document.id, "")
        if title and title not in hidden:
            yield {"title": title, "text": document.text}
