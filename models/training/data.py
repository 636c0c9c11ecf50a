"""Examples and texts that a recipe's data entries name."""

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.errors import TrainingError
from core.text import document_text, normalize_text
from core.types import Role
from models.evaluation.beir import Qrels, read_qrels, read_queries
from models.jsonl import read_jsonl
from models.training.recipe import DataEntry, Dev, Part

# Where a mined file of triples lies, by the name of the stage that mined it.
Mined = Mapping[str, Path]

_SENTENCE = re.compile(r".*?(?:[。！？!?；;]|$)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Example:
    """A query with the documents that answer it and hard negatives that do not."""

    query: str
    positives: tuple[str, ...]
    negatives: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Text:
    """A text and as what it is encoded."""

    role: Role
    text: str


@dataclass(frozen=True, slots=True)
class DevSet:
    """Queries, the documents that are searched, and judgements."""

    queries: dict[str, str]
    documents: dict[str, str]
    qrels: Qrels


def entry_files(entry: DataEntry | Dev, mined: Mined) -> list[Path]:
    """Returns the files that an entry is read from."""
    if isinstance(entry, Dev) or entry.beir is not None:
        folder = Path(entry.beir or "")
        split = (f"{entry.split}.queries.jsonl", f"{entry.split}.qrels.tsv")
        return [folder / name for name in ("corpus.jsonl", *split)]
    if entry.mined is not None:
        if entry.mined not in mined:
            raise TrainingError(f"data: mined: no stage '{entry.mined}' mined before this one")
        return [mined[entry.mined]]
    return [Path(entry.triples or entry.texts or entry.pairs or "")]


def read_examples(
    entries: Sequence[DataEntry], held_out: frozenset[str], mined: Mined
) -> tuple[list[Example], int]:
    """Reads examples; those of equal queries become one.

    Args:
        entries: What is read.
        held_out: Queries that must not be trained on.
        mined: Where mined triples lie.

    Returns:
        The examples, and how many were left out because their query is held out.

    Raises:
        TrainingError: If a file cannot be read or a line is no example; it names both.
    """
    merged: dict[str, tuple[list[str], list[str]]] = {}
    dropped = 0
    for entry in entries:
        for count, example in enumerate(_examples(entry, mined)):
            if entry.limit is not None and count >= entry.limit:
                break
            if example.query in held_out:
                dropped += 1
                continue
            positives, negatives = merged.setdefault(example.query, ([], []))
            positives.extend(example.positives)
            negatives.extend(example.negatives)
    examples = []
    for query, (positives, negatives) in merged.items():
        known = dict.fromkeys(positives)
        others = dict.fromkeys(text for text in negatives if text not in known)
        examples.append(Example(query, tuple(known), tuple(others)))
    if not examples:
        raise TrainingError(f"data: no example is left of {_sources(entries)}")
    return examples, dropped


def read_texts(
    entries: Sequence[DataEntry], held_out: frozenset[str], mined: Mined
) -> tuple[list[Text], int]:
    """Reads texts, each once in each role.

    A record that holds a held-out query is left out with all its texts: others may say the same.

    Returns:
        The texts in the order of the entries, and how many were left out as held out.

    Raises:
        TrainingError: If a file cannot be read or a line has no text; it names both.
    """
    texts: dict[Text, None] = {}
    dropped = 0
    for entry in entries:
        left = entry.limit
        for record in _texts(entry, mined):
            if any(text.text in held_out for text in record):
                dropped += len(record)
                continue
            for text in record[:left]:
                cut = first_sentence(text.text) if entry.cut == "sentence" else text.text
                texts[Text(text.role, cut)] = None
            if left is not None and (left := left - len(record)) <= 0:
                break
    if not texts:
        raise TrainingError(f"data: no text is left of {_sources(entries)}")
    return list(texts), dropped


def read_documents(entries: Sequence[DataEntry], mined: Mined) -> list[str]:
    """Returns the documents of entries, each once: what hard negatives are mined from."""
    documents: dict[str, None] = {}
    for entry in entries:
        if entry.beir is not None:
            documents |= dict.fromkeys(_beir_documents(entry).values())
        else:
            for example in _examples(entry, mined):
                documents |= dict.fromkeys((*example.positives, *example.negatives))
    return list(documents)


def read_dev(dev: Dev) -> DevSet:
    """Reads what nDCG is measured on.

    Raises:
        TrainingError: If no judged query is left.
    """
    folder = Path(dev.beir)
    queries = _beir_queries(folder, dev.split)
    corpus = _beir_documents(dev)
    qrels: Qrels = {}
    for query, judged in read_qrels(folder / f"{dev.split}.qrels.tsv").items():
        found = {id_: grade for id_, grade in judged.items() if id_ in corpus}
        if (
            query in queries
            and in_part(queries[query], dev.part)
            and max(found.values(), default=0)
        ):
            qrels[query] = found
    chosen = sorted(qrels, key=lambda id_: _digest(queries[id_]))[: dev.queries]
    if not chosen:
        raise TrainingError(f"dev: {folder} has no judged query of split '{dev.split}'")
    qrels = {id_: qrels[id_] for id_ in chosen}
    if dev.documents is not None:
        judged_ids = dict.fromkeys(id_ for found in qrels.values() for id_ in found)
        others = sorted((id_ for id_ in corpus if id_ not in judged_ids), key=_digest)
        corpus = {id_: corpus[id_] for id_ in (*judged_ids, *others[: dev.documents])}
    return DevSet({id_: queries[id_] for id_ in chosen}, corpus, qrels)


def first_sentence(text: str) -> str:
    """Returns a text up to the end of its first sentence, the mark included."""
    match = _SENTENCE.match(text)
    return match.group().strip() if match else text


def in_part(text: str, part: Part | None) -> bool:
    """Whether a query belongs to a part; equal texts always belong together."""
    if part is None:
        return True
    fold = _digest(text) % part.folds
    return fold == part.only if part.only is not None else fold != part.without


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def _sources(entries: Iterable[DataEntry]) -> str:
    return ", ".join(str(getattr(entry, entry.source)) for entry in entries)


def _examples(entry: DataEntry, mined: Mined) -> Iterator[Example]:
    readers: dict[str, Callable[[DataEntry, Mined], Iterator[Example]]] = {
        "triples": _triples,
        "mined": _triples,
        "beir": _beir_examples,
        "pairs": _pairs,
    }
    if entry.source not in readers:
        raise TrainingError(f"data: {entry.texts} holds single texts, where examples are needed")
    return (e for e in readers[entry.source](entry, mined) if in_part(e.query, entry.part))


def _texts(entry: DataEntry, mined: Mined) -> Iterator[list[Text]]:
    """Yields the texts of each record."""
    if entry.texts is not None:
        for where, record in _read(Path(entry.texts)):
            fields = entry.fields or ["text"]
            read = [_text(record.get(field), f"{where}: {field}") for field in fields]
            if in_part(read[0], entry.part):
                yield [Text(entry.role, text) for text in read]
        return
    documents = "document" in entry.roles
    whole_corpus = entry.beir is not None and not entry.part
    if "query" in entry.roles or not whole_corpus:
        for example in _examples(entry, mined):
            texts = [Text("query", example.query)] if "query" in entry.roles else []
            if documents and not whole_corpus:
                found = (*example.positives, *example.negatives)
                texts += [Text("document", text) for text in found]
            yield texts
    if documents and whole_corpus:
        yield from ([Text("document", text)] for text in _beir_documents(entry).values())


def _triples(entry: DataEntry, mined: Mined) -> Iterator[Example]:
    (path,) = entry_files(entry, mined)
    for where, record in _read(path):
        query = _text(record.get("query"), f"{where}: query")
        positives = _many(record, "positives", where)
        negatives = _many(record, "negatives", where)
        if not positives:
            raise TrainingError(f"{where}: positives is empty: a query needs a document")
        if set(positives) & set(negatives):
            raise TrainingError(f"{where}: a positive is also a negative")
        yield Example(query, positives, negatives)


def _pairs(entry: DataEntry, mined: Mined) -> Iterator[Example]:
    first, second = entry.fields or ("title", "text")
    for where, record in _read(Path(entry.pairs or "")):
        query = _text(record.get(first), f"{where}: {first}")
        yield Example(query, (_text(record.get(second), f"{where}: {second}"),))


def _beir_examples(entry: DataEntry, mined: Mined) -> Iterator[Example]:
    folder = Path(entry.beir or "")
    queries = _beir_queries(folder, entry.split)
    qrels_path = folder / f"{entry.split}.qrels.tsv"
    corpus, every = _beir_documents(entry), _beir_ids(folder)
    for query, judged in read_qrels(qrels_path).items():
        if query not in queries:
            raise TrainingError(f"{qrels_path}: query '{query}' is not among the queries")
        if missing := [id_ for id_ in judged if id_ not in every]:
            raise TrainingError(f"{qrels_path}: document '{missing[0]}' is not in the corpus")
        found = [(corpus[id_], grade) for id_, grade in judged.items() if id_ in corpus]
        positives = tuple(text for text, grade in found if grade > 0)
        negatives = tuple(text for text, grade in found if grade <= 0)
        if positives:
            yield Example(queries[query], positives, negatives)


def _beir_queries(folder: Path, split: str) -> dict[str, str]:
    path = folder / f"{split}.queries.jsonl"
    return {id_: _text(text, f"{path}: '{id_}'") for id_, text in read_queries(path).items()}


def _beir_documents(entry: DataEntry | Dev) -> dict[str, str]:
    path = Path(entry.beir or "") / "corpus.jsonl"
    documents: dict[str, str] = {}
    for where, record in _read(path):
        metadata = record.get("metadata") or {}
        if not isinstance(metadata, dict):
            raise TrainingError(f"{where}: metadata is no object")
        if any(metadata.get(field) != value for field, value in entry.where.items()):
            continue
        id_ = record.get("_id")
        if not isinstance(id_, str) or id_ in documents:
            raise TrainingError(f"{where}: _id is missing or a duplicate")
        title, text = record.get("title") or "", record.get("text")
        if not isinstance(title, str) or not isinstance(text, str) or not normalize_text(text):
            raise TrainingError(f"{where}: title or text is no text, or the text is empty")
        documents[id_] = document_text(title, text)
    if not documents:
        raise TrainingError(f"{path}: no document has {dict(entry.where)}")
    return documents


def _beir_ids(folder: Path) -> set[str]:
    return {str(record.get("_id")) for _, record in read_jsonl(folder / "corpus.jsonl")}


def _read(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields records, each with its file and line for messages."""
    for number, record in read_jsonl(path):
        yield f"{path} line {number}", record


def _many(record: dict[str, Any], field: str, where: str) -> tuple[str, ...]:
    values = record.get(field) or []
    if not isinstance(values, list):
        raise TrainingError(f"{where}: {field} is not a list of texts")
    return tuple(_text(value, f"{where}: {field}") for value in values)


def _text(value: Any, where: str) -> str:
    """Returns a text under the text rules; a document may be an object with title and text."""
    if isinstance(value, dict):
        title, text = value.get("title") or "", value.get("text")
        if isinstance(title, str) and isinstance(text, str):
            value = document_text(title, text)
    elif isinstance(value, str):
        value = normalize_text(value)
    if not isinstance(value, str) or not value:
        raise TrainingError(f"{where} is missing, empty or no text")
    return value
