"""Reading of training examples and texts from the data entries of a recipe.

Functions raise a DataError with file and line if a file cannot be read or a record is invalid,
and a TrainingError if no data remain.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from core.encoders import Role
from core.errors import DataError
from core.records import Triple, field_error, read_field, read_jsonl, read_triples, record_error
from core.terms import TermList, term_list_path
from core.text import document_text, first_sentence, normalize_text
from core.types import FloatArray
from evaluation.beir import (
    Qrels,
    Run,
    beir_paths,
    check_judged,
    read_documents,
    read_qrels,
    read_queries,
)
from evaluation.dense import dense_run
from training.corpus import Corpus, Text
from training.errors import TrainingError
from training.schema import DataEntry, Dev, Part

# Files of mined triples, by the name of the stage that wrote them.
Mined = Mapping[str, Path]


@dataclass(frozen=True, slots=True)
class DevSet:
    """Queries and documents by id, and judgements."""

    queries: dict[str, str]
    documents: dict[str, str]
    qrels: Qrels

    def texts(self, role: Role) -> list[str]:
        """Returns the texts of all queries or of all documents."""
        return list((self.queries if role == "query" else self.documents).values())

    def search(self, queries: FloatArray, documents: FloatArray) -> Run:
        """Returns for each query its 100 nearest documents that count, with their cosines.

        The vectors, float32 [queries, d] and [documents, d], have unit norm.
        """
        return dense_run(self.queries, queries, self.documents, documents, 100, self.qrels)


def entry_files(entry: DataEntry | Dev, mined: Mined) -> list[Path]:
    """Returns the files of a data entry; TrainingError if `mined` lacks the stage that it names."""
    if isinstance(entry, Dev) or entry.beir is not None:
        return list(beir_paths(Path(entry.beir or ""), entry.split))
    if entry.mined is not None:
        if entry.mined not in mined:
            reason = f"no earlier stage of kind mine is named '{entry.mined}'"
            raise TrainingError.at("data.mined", reason, "missing_stage", stage=entry.mined)
        return [mined[entry.mined]]
    if entry.terms is not None:
        return [term_list_path(entry.terms)]
    return [Path(entry.triples or entry.texts or entry.pairs or "")]


def read_examples(
    entries: Sequence[DataEntry], held_out: frozenset[str], mined: Mined
) -> tuple[list[Triple], int]:
    """Returns the examples of a few data, merged by query, and the number of held-out ones."""
    counts = Counter[str]()
    corpus = Corpus.of(stream_examples(entries, held_out, mined, counts))
    return list(corpus.examples()), counts["held_out"]


def read_texts(
    entries: Sequence[DataEntry], held_out: frozenset[str], mined: Mined
) -> tuple[list[Text], int]:
    """Returns the texts of a few data, once in each role, and the number of held-out ones."""
    counts = Counter[str]()
    texts = dict.fromkeys(stream_texts(entries, held_out, mined, counts))
    return list(texts), counts["held_out"]


def stream_examples(
    entries: Sequence[DataEntry], held_out: frozenset[str], mined: Mined, counts: Counter[str]
) -> Iterator[Triple]:
    """Yields the examples whose query is not held out; `counts["held_out"]` counts the others."""
    found = False
    for entry in entries:
        for example in islice(_examples(entry, mined), entry.limit):
            if example.query in held_out:
                counts["held_out"] += 1
                continue
            found = True
            yield example
    if not found:
        raise _no_data_error("example", entries)


def stream_texts(
    entries: Sequence[DataEntry], held_out: frozenset[str], mined: Mined, counts: Counter[str]
) -> Iterator[Text]:
    """Yields the texts of entries in order, with repetitions.

    A record that contains a held-out query is dropped with all its texts, because the other
    texts may be paraphrases of the query. `counts["held_out"]` counts the dropped texts.
    """
    found = False
    for entry in entries:
        remaining = entry.limit
        for record in _texts(entry, mined):
            if any(text.text in held_out for text in record):
                counts["held_out"] += len(record)
                continue
            for text in record[:remaining]:
                found = True
                cut = first_sentence(text.text) if entry.cut == "sentence" else text.text
                yield Text(text.role, cut)
            if remaining is not None and (remaining := remaining - len(record)) <= 0:
                break
    if not found:
        raise _no_data_error("text", entries)


def stream_documents(entries: Sequence[DataEntry], mined: Mined) -> Iterator[str]:
    """Yields the documents of entries, from which hard negatives are mined, with repetitions."""
    for entry in entries:
        if entry.beir is not None:
            yield from _read_beir(entry).documents.values()
        else:
            for example in _examples(entry, mined):
                yield from (*example.positives, *example.negatives)


def read_dev(dev: Dev) -> DevSet:
    """Reads the development set on which nDCG@10 is measured."""
    split = _read_beir(dev)
    queries, corpus = split.queries, split.documents
    qrels: Qrels = {}
    for query, judged in split.qrels.items():
        found = {id_: score for id_, score in judged.items() if id_ in corpus}
        if in_part(queries[query], dev.part) and max(found.values(), default=0) > 0:
            qrels[query] = found
    chosen = sorted(qrels, key=lambda id_: _digest(queries[id_]))[: dev.queries]
    if not chosen:
        reason = f"split '{dev.split}' of {dev.beir} has no query with a relevant document"
        raise TrainingError.at("dev", reason, "no_queries")
    qrels = {id_: qrels[id_] for id_ in chosen}
    if dev.documents is not None:
        judged_ids = dict.fromkeys(id_ for found in qrels.values() for id_ in found)
        others = sorted((id_ for id_ in corpus if id_ not in judged_ids), key=_digest)
        corpus = {id_: corpus[id_] for id_ in (*judged_ids, *others[: dev.documents])}
    return DevSet({id_: queries[id_] for id_ in chosen}, corpus, qrels)


def in_part(text: str, part: Part | None) -> bool:
    """Returns whether a text belongs to a part; equal texts are always in the same part."""
    if part is None:
        return True
    fold = _digest(text) % part.folds
    return fold == part.only if part.only is not None else fold != part.without


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def _no_data_error(kind: str, entries: Iterable[DataEntry]) -> TrainingError:
    sources = ", ".join(str(getattr(entry, entry.source)) for entry in entries)
    reason = f"no {kind} remains of {sources}: check where, part and the held-out queries of dev"
    return TrainingError.at("data", reason, f"no_{kind}s")


def _examples(entry: DataEntry, mined: Mined) -> Iterator[Triple]:
    if entry.texts is not None:
        reason = f"{entry.texts} holds single texts; this stage needs triples, pairs, beir or mined"
        raise TrainingError.at("data.texts", reason, "not_examples")
    (path, *_) = entry_files(entry, mined)
    read = {"beir": _beir_examples, "pairs": _pairs, "terms": _term_pairs}.get(
        entry.source, _triples
    )
    return (e for e in read(entry, path) if in_part(e.query, entry.part))


def _texts(entry: DataEntry, mined: Mined) -> Iterator[list[Text]]:
    if entry.texts is not None:
        path = Path(entry.texts)
        for number, record in read_jsonl(path):
            # A document is its title and text, as at indexing.
            whole = {"text": record if entry.role == "document" else record.get("text")}
            fields = {name: record.get(name) for name in entry.fields} or whole
            read = [read_field(path, number, value, name) for name, value in fields.items()]
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
        yield from ([Text("document", text)] for text in _read_beir(entry).documents.values())


def _triples(_: DataEntry, path: Path) -> Iterator[Triple]:
    for number, triple in read_triples(path):
        if not triple.positives:
            reason = "is empty: give at least one relevant document"
            raise field_error(path, number, "positives", reason)
        if set(triple.positives) & set(triple.negatives):
            reason = "lists the same document in positives and negatives"
            raise record_error(path, number, reason, code="contradiction")
        yield triple


def _pairs(entry: DataEntry, path: Path) -> Iterator[Triple]:
    fields = entry.fields or ("title", "text")
    for number, record in read_jsonl(path):
        query, document = (read_field(path, number, record.get(field), field) for field in fields)
        yield Triple(query, (document,))


def _term_pairs(_: DataEntry, path: Path) -> Iterator[Triple]:
    for word, terms in TermList.read(path).terms.items():
        if terms != (word,):
            yield Triple(word, (" ".join(terms[:2]),))


def _beir_examples(entry: DataEntry, _: Path) -> Iterator[Triple]:
    split = _read_beir(entry)
    for query, judged in split.qrels.items():
        found = [(split.documents[i], score) for i, score in judged.items() if i in split.documents]
        positives = tuple(text for text, score in found if score > 0)
        if positives:
            negatives = tuple(text for text, score in found if score == 0)
            yield Triple(split.queries[query], positives, negatives)


def _read_beir(entry: DataEntry | Dev) -> DevSet:
    """Returns all queries and judgements, and the documents that an entry's `where` selects."""
    paths = beir_paths(Path(entry.beir or ""), entry.split)
    queries = read_queries(paths.queries)
    for id_, text in queries.items():
        queries[id_] = _not_empty(normalize_text(text), paths.queries, id_)
    documents = read_documents(paths.corpus)
    selected = {}
    for document in documents:
        _not_empty(normalize_text(document.text), paths.corpus, document.id)
        if all(document.metadata.get(field) == value for field, value in entry.where.items()):
            selected[document.id] = document_text(document.title, document.text)
    if not selected:
        reason = f"no document has the metadata {dict(entry.where)} of `where`"
        raise TrainingError.at(paths.corpus, reason, "no_documents")
    qrels = read_qrels(paths.qrels)
    check_judged(paths.qrels, qrels, queries, {document.id for document in documents})
    return DevSet(queries, selected, qrels)


def _not_empty(text: str, path: Path, id_: str) -> str:
    if not text:
        raise DataError(f"{path}: the text of '{id_}' is empty", code="empty", path=path, id=id_)
    return text
