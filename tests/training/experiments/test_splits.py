"""Splits of medical-qa-zh, on a small folder of the same layout."""

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from core.errors import CareError, DataError
from core.records import read_jsonl
from evaluation.beir import beir_paths, read_judged_queries, read_qrels, read_queries, write_split
from tests.conftest import write_jsonl
from tests.errors import raises
from training.data import in_part
from training.experiments.splits import UNSEEN, write_splits

COUNT = 90
PATIENTS = {f"p{i}": f"第{i}个病人问的问题？" for i in range(COUNT)}
KNOWLEDGE = {f"k{i}": f"第{i}个知识库的问题？" for i in range(COUNT)}
IN_FOLD = [id_ for id_, text in PATIENTS.items() if in_part(text, UNSEEN)]


def reword(
    queries: Mapping[str, str], part: str, *, versions: int
) -> Iterable[tuple[str, str, str]]:
    for id_, text in queries.items():
        yield from ((f"{id_}-{n}", f"{part}{n} {text}", id_) for n in range(1, versions + 1))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    sources = {"p": "patient-qa", "k": "knowledge-qa"}
    queries = PATIENTS | KNOWLEDGE
    documents = [
        {"_id": f"d-{id_}", "text": f"回答{id_}", "metadata": {"source": sources[id_[0]]}}
        for id_ in queries
    ]
    write_jsonl(folder / "corpus.jsonl", documents)
    write_split(folder, "train", queries, {id_: {f"d-{id_}": 1} for id_ in queries})
    described = [{"text1": text, "text2": f"描述 {text}"} for text in PATIENTS.values()]
    write_jsonl(folder / "train.paraphrases.jsonl", described[: COUNT - 10])
    write_jsonl(
        folder / "spoken.jsonl",
        [{"_id": IN_FOLD[0], "text": "口语的说法"}, {"_id": "elsewhere", "text": "别处的"}],
    )
    (folder / "words").mkdir()
    return folder


def write(data: Path, out: Path) -> dict[str, int]:
    return write_splits(
        data, out, reword, spoken=data / "spoken.jsonl", words=data / "words", held_out=20, tune=10
    )


def test_splits_follow_the_checksums(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    sizes = write(data, out)
    ids = {name: list(read_queries(out / f"{name}.queries.jsonl")) for name in sizes}
    assert {name: len(found) for name, found in ids.items()} == sizes

    def smallest(texts: Mapping[str, str]) -> list[str]:
        return sorted(texts, key=lambda id_: hashlib.sha256(id_.encode()).hexdigest())

    ordered = smallest(PATIENTS)
    assert ids["held-out-patients"] == ordered[:20]
    assert ids["held-out-knowledge"] == smallest(KNOWLEDGE)[:20]
    assert set(ids["unseen"]) == set(IN_FOLD)
    later = ordered[20:]
    tuned = [*(i for i in later if i in IN_FOLD), *(i for i in later if i not in IN_FOLD)][:10]
    assert ids["tune"] == tuned
    apart = {*ids["held-out-patients"], *ids["unseen"], *ids["tune"]}
    assert ids["train"] == [id_ for id_ in later if id_ not in apart]
    assert sizes["train"] + len(apart) == COUNT
    assert (out / "corpus.jsonl").read_bytes() == (data / "corpus.jsonl").read_bytes()


def test_knowledge_questions_are_in_no_split_but_theirs(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for name in write(data, out):
        documents = {
            id_ for judged in read_qrels(out / f"{name}.qrels.tsv").values() for id_ in judged
        }
        wanted = "d-k" if name == "held-out-knowledge" else "d-p"
        assert {id_[:3] for id_ in documents} == {wanted}


def test_descriptions_and_rewordings_have_the_judgements_of_their_question(
    data: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    write(data, out)
    read = {
        name: read_judged_queries(*beir_paths(out, name)[1:])
        for name in (
            "train",
            "train-described",
            "train-reworded",
            "held-out-described",
            "held-out-reworded",
            "held-out-spoken",
            "held-out-asked",
        )
    }
    texts, _ = read["train"]
    described, qrels = read["train-described"]
    assert described == {i: f"描述 {t}" for i, t in texts.items() if int(i[1:]) < COUNT - 10}
    assert qrels == {id_: {f"d-{id_}": 1} for id_ in described}

    reworded, qrels = read["train-reworded"]
    assert reworded == {f"{i}-{n}": f"a{n} {t}" for i, t in texts.items() for n in (1, 2)}
    assert qrels == {id_: {f"d-{id_[:-2]}": 1} for id_ in reworded}
    held, _ = read["held-out-reworded"]
    assert {text[:2] for text in held.values()} == {"b1"}
    assert not {id_[:-2] for id_ in held} & texts.keys()

    # Only questions of the split unseen.
    assert read["held-out-spoken"][0] == {IN_FOLD[0]: "口语的说法"}
    assert read["held-out-asked"][0] == {IN_FOLD[0]: PATIENTS[IN_FOLD[0]]}
    assert read["held-out-spoken"][1] == read["held-out-asked"][1]


def test_the_files_are_the_same_in_each_run(data: Path, tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    for out in folders:
        write(data, out)
    one, two = ({path.name: path.read_bytes() for path in out.iterdir()} for out in folders)
    assert one == two


def test_splits_without_queries_are_not_written(data: Path, tmp_path: Path) -> None:
    (data / "train.paraphrases.jsonl").unlink()
    sizes = write(data, tmp_path / "out")
    assert not [name for name in sizes if name.endswith("-described")]
    assert not list((tmp_path / "out").glob("*-described*"))


def test_wrong_folders_are_named(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with (data / "corpus.jsonl").open("a", encoding="utf-8") as corpus:
        corpus.write('{"_id": "other", "text": "t", "metadata": {"source": "web"}}\n')
    with (data / "train.qrels.tsv").open("a", encoding="utf-8") as qrels:
        qrels.write("p0\tother\t1\n")
    with raises(DataError, code="unknown_source", path=data / "corpus.jsonl", id="other"):
        write(data, out)
    assert not out.exists()
    out.mkdir()
    text = (data / "train.qrels.tsv").read_text("utf-8").removesuffix("p0\tother\t1\n")
    (data / "train.qrels.tsv").write_text(text, "utf-8")
    with raises(CareError, code="folder_exists", path=out):
        write(data, out)


def test_texts_written_by_hand_are_in_the_part_of_their_original(
    data: Path, tmp_path: Path
) -> None:
    sizes = write(data, tmp_path / "before")
    train, tune, held = (
        next(iter(read_queries(tmp_path / "before" / f"{name}.queries.jsonl")))
        for name in ("train", "tune", "held-out-patients")
    )
    asked = read_queries(tmp_path / "before" / "train.queries.jsonl")[train]
    words = data / "words"
    write_jsonl(
        words / "rewrites-train.jsonl",
        [{"_id": id_, "writer": "t1", "text": f"{id_} 口语"} for id_ in (train, tune)],
    )
    write_jsonl(
        words / "rewrites-test.jsonl",
        [{"_id": held, "writer": writer, "text": f"{writer} 口语"} for writer in ("e1", "e2")],
    )
    write_jsonl(
        words / "keywords.jsonl",
        [
            {"_id": train, "writer": "k", "text": "两个 词", "meaning": "两个词的意思"},
            {"_id": held, "writer": "k", "text": "词", "forms": ["个知识库的", "没有的"]},
        ],
    )
    out = tmp_path / "out"
    made = write(data, out)
    new = {name: count for name, count in made.items() if name not in sizes}
    assert new == {
        "train-rewrites": 1,
        "tune-rewrites": 1,
        "held-out-rewrites-e1-spoken": 1,
        "held-out-rewrites-e1-asked": 1,
        "held-out-rewrites-e2-spoken": 1,
        "held-out-rewrites-e2-asked": 1,
        "train-keywords": 1,
        "held-out-keywords-k": 1,
    }
    assert list(read_jsonl(out / "train-words.jsonl")) == [
        (1, {"_id": f"{train}-k", "text": "两个 词", "original_text": "两个词的意思"}),
        (2, {"_id": train, "text": f"{train} 口语", "original_text": asked}),
    ]
    texts, qrels = read_judged_queries(*beir_paths(out, "held-out-rewrites-e2-spoken")[1:])
    assert (texts, qrels) == ({held: "e2 口语"}, {held: {f"d-{held}": 1}})
    texts, qrels = read_judged_queries(*beir_paths(out, "held-out-keywords-k")[1:])
    assert set(qrels[f"{held}-k"]) == {f"d-{held}", *(f"d-{id_}" for id_ in KNOWLEDGE)}
    _, qrels = read_judged_queries(*beir_paths(out, "train-keywords")[1:])
    assert qrels == {f"{train}-k": {f"d-{train}": 1}}
