from pathlib import Path
from types import SimpleNamespace

import mteb
import pytest

from core.encoders import Pair
from core.errors import CareError
from evaluation.cmedteb.evaluate import (
    Bm25Model,
    PairModel,
    RankingTask,
    StsTask,
    evaluate_task,
    load_systems,
    run_benchmark,
    with_instruction,
)
from evaluation.cmedteb.results import read_score
from evaluation.cmedteb.tasks import PAPER_COLUMNS, RankingData, find_tasks, task
from evaluation.metrics import read_run
from models.pairs import load_pair, write_pair
from tests.conftest import write_jsonl
from tests.errors import raises
from tests.evaluation.cmedteb.data import TOPICS, Encoders, write_data

pytestmark = pytest.mark.train


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_data(tmp_path / "data")


@pytest.fixture
def encoders() -> Encoders:
    return Encoders()


@pytest.fixture
def pair() -> Pair:
    return load_pair("care-mini")


def retrieval_data(data: Path) -> RankingData:
    read = find_tasks(str(data), "test")[task("retrieval")]()
    assert isinstance(read, RankingData)
    return read


def test_scores_are_those_of_mteb(
    data: Path, tmp_path: Path, pair: Pair, encoders: Encoders
) -> None:
    # A judged query without a relevant document counts, here as in mteb and trec_eval.
    with (data / "retrieval" / "queries.jsonl").open("a") as file:
        file.write('{"_id": "none", "text": "其他"}\n')
    with (data / "retrieval" / "qrels" / "test.tsv").open("a") as file:
        file.write("none\td0\t0\n")
    found = find_tasks(str(data), "test")
    assert [known.name for known in found] == list(PAPER_COLUMNS)
    system = PairModel(pair, tmp_path / "cache", load=encoders.load)
    for known, read in found.items():
        score = evaluate_task(system, known, read(), tmp_path / "out")
        kind = StsTask if known.kind == "sts" else RankingTask
        result = mteb.evaluate(system, kind(known, read()), cache=None, co2_tracker=False)  # type: ignore[arg-type]
        assert score is not None
        assert score.value == pytest.approx(result.task_results[0].get_score(), abs=1e-5)
        assert 0 < score.value < 1
        assert score.low <= score.value <= score.high
        assert read_score(tmp_path / "out" / pair.name / f"{known.name}.json") == score


def test_each_side_encodes_with_its_own_encoder(
    data: Path, tmp_path: Path, pair: Pair, encoders: Encoders
) -> None:
    system = PairModel(pair, tmp_path / "cache", load=encoders.load)
    evaluate_task(system, task("retrieval"), retrieval_data(data), tmp_path / "out")
    asked = {encoder.spec.role: encoder.texts for encoder in encoders.made}
    assert sorted(asked["query"]) == sorted(topic[:4] for topic in TOPICS)
    assert len(asked["document"]) == 20


def test_no_text_is_encoded_twice(
    data: Path, tmp_path: Path, pair: Pair, encoders: Encoders
) -> None:
    for _ in range(2):
        system = PairModel(pair, tmp_path / "cache", load=encoders.load)
        evaluate_task(system, task("retrieval"), retrieval_data(data), tmp_path / "out")
    assert sum(len(encoder.texts) for encoder in encoders.made) == 25


def test_instructions_replace_those_of_prompts(pair: Pair) -> None:
    told = pair.query.model_copy(update={"prompt": "Instruct: old\nQuery:"})
    assert with_instruction(told, r"find \1").prompt == "Instruct: find \\1\nQuery:"
    assert with_instruction(told, "").prompt == told.prompt
    assert with_instruction(pair.query, "find").prompt == pair.query.prompt


@pytest.mark.parametrize(
    ("prompt", "instruction"), [("find", "find"), ({"query": "find"}, "find"), (None, "old")]
)
def test_mteb_tasks_have_instructions_of_several_types(
    tmp_path: Path, pair: Pair, encoders: Encoders, prompt: object, instruction: str
) -> None:
    query = pair.query.model_copy(update={"prompt": "Instruct: old\nQuery:"})
    told = pair.model_copy(update={"query": query})
    system = PairModel(told, tmp_path / "cache", load=encoders.load)
    metadata = SimpleNamespace(prompt=prompt)
    system.encode([{"text": ["x"]}], task_metadata=metadata, hf_split="", hf_subset="")
    assert encoders.made[0].spec.prompt == f"Instruct: {instruction}\nQuery:"


def test_bm25_retrieves_and_reranks_and_does_not_support_sts(data: Path, tmp_path: Path) -> None:
    found = find_tasks(str(data), "test")
    out = tmp_path / "out"
    scores = {
        known.name: evaluate_task(Bm25Model(), known, read(), out) for known, read in found.items()
    }
    assert scores["sts"] is None
    rerank = found[task("rerank")]()
    assert isinstance(rerank, RankingData)
    run = read_run(out / "bm25" / "rerank.trec")
    assert {q: set(s) for q, s in run.items()} == {
        q: set(c) for q, c in (rerank.candidates or {}).items()
    }
    assert scores["retrieval"] is not None and scores["retrieval"].value > 0.6


def test_an_id_with_white_space_writes_no_score(data: Path, tmp_path: Path) -> None:
    for name in ("corpus.jsonl", "qrels/test.tsv"):
        path = data / "retrieval" / name
        path.write_text(path.read_text("utf-8").replace("d19", "d 19"), "utf-8")
    out = tmp_path / "out"
    with raises(CareError, code="white_space_in_id", id="d 19"):
        evaluate_task(Bm25Model(), task("retrieval"), retrieval_data(data), out)
    assert not list(out.glob("*/*"))


def test_judgements_without_a_relevant_document(data: Path, tmp_path: Path) -> None:
    (data / "retrieval" / "qrels" / "test.tsv").write_text("q0\td0\t0\n", "utf-8")
    with raises(CareError, code="no_relevant_document", task="retrieval"):
        evaluate_task(Bm25Model(), task("retrieval"), retrieval_data(data), tmp_path / "out")


def test_equal_similarities_are_an_error(
    data: Path, tmp_path: Path, pair: Pair, encoders: Encoders
) -> None:
    same = [{"text1": "a", "text2": "a", "label": at % 2} for at in range(len(TOPICS))]
    write_jsonl(data / "sts.jsonl", same)
    system = PairModel(pair, tmp_path / "cache", load=encoders.load)
    sts, out = task("sts"), tmp_path / "out"
    with raises(CareError, code="equal_similarities", system="care-mini", task="sts"):
        evaluate_task(system, sts, find_tasks(str(data), "test")[sts](), out)
    assert not out.exists()


def test_bm25_has_two_analyzers(tmp_path: Path) -> None:
    tasks = find_tasks(str(write_data(tmp_path / "data")), "test")
    systems = load_systems(["bm25", "bm25-characters"], tmp_path)
    run_benchmark(systems, tasks, tmp_path / "out")
    words, characters = (
        read_run(tmp_path / "out" / system.name / "retrieval.trec") for system in systems
    )
    assert words.keys() == characters.keys()
    assert words != characters


def test_a_pair_with_instructions_of_a_file_is_another_system(tmp_path: Path) -> None:
    pair = load_pair("care-mini")
    told = pair.query.model_copy(update={"prompt": "Instruct: find\nQuery:"})
    write_pair(pair.model_copy(update={"name": "told", "query": told}), tmp_path / "told.toml")
    names = ["care-mini", str(tmp_path / "told.toml"), "bm25"]
    for file, expected in ((None, "told"), (tmp_path / "table-8.toml", "told+table-8")):
        systems = load_systems(names, tmp_path, instructions=file, load=Encoders().load)
        assert [system.name for system in systems] == ["care-mini", expected, "bm25"]
