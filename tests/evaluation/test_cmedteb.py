import json
import sys
from pathlib import Path

import mteb
import numpy as np
import pytest

from core.errors import CareError
from core.types import EncoderSpec, Encoding, Pair
from models.encoders.cached import encode_cached
from models.evaluation.cmedteb import __main__ as command
from models.evaluation.cmedteb.evaluate import evaluate_task
from models.evaluation.cmedteb.report import html_report
from models.evaluation.cmedteb.results import read_score, read_scores, score_path
from models.evaluation.cmedteb.systems import Bm25Model, PairModel, with_instruction
from models.evaluation.cmedteb.tasks import PAPER_COLUMNS, RankingTask, find_tasks, task
from models.evaluation.cmedteb.tradeoff import is_asymmetric
from models.evaluation.trec import read_run
from models.pairs import load_pair, write_pair
from tests.evaluation.test_data import write_lines

TOPICS = ["高血压少盐饮食", "骨折固定患肢", "儿童发热多饮水", "糖尿病监测血糖", "哮喘吸入药物"]


class CharacterEncoder:
    """Counts characters, hashed; remembers what it was asked."""

    def __init__(self, spec: EncoderSpec) -> None:
        self.spec = spec
        self.texts: list[str] = []

    def encode(self, texts: list[str]) -> Encoding:
        self.texts += texts
        vectors = np.full((len(texts), self.spec.dimension), 1e-3, dtype=np.float32)
        for row, text in enumerate(texts):
            for character in self.spec.prompt + text:
                vectors[row, ord(character) % self.spec.dimension] += 1
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        counts = np.array([len(text) for text in texts], dtype=np.int32)
        return Encoding(vectors, counts, np.zeros(len(texts), dtype=np.bool_))


class Encoders:
    def __init__(self) -> None:
        self.made: list[CharacterEncoder] = []

    def load(self, spec: EncoderSpec, folder: Path) -> CharacterEncoder:
        self.made.append(CharacterEncoder(spec))
        return self.made[-1]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    root = tmp_path / "data"
    passages = [f"{topic}，{number}" for topic in TOPICS for number in range(4)]
    write_lines(
        root / "retrieval" / "corpus.jsonl",
        [{"_id": f"d{i}", "text": text} for i, text in enumerate(passages)],
    )
    write_lines(
        root / "retrieval" / "test.queries.jsonl",
        [{"_id": f"q{i}", "text": topic[:4]} for i, topic in enumerate(TOPICS)],
    )
    qrels = "".join(f"q{i}\td{4 * i + n}\t{1 + n % 2}\n" for i in range(5) for n in range(3))
    (root / "retrieval" / "test.qrels.tsv").write_text(qrels, "utf-8")
    rerank = [
        {"query": t[:3], "positives": [t, passages[4 * i + 1]], "negatives": passages[:12:4]}
        for i, t in enumerate(TOPICS)
    ]
    for name in ("cmedqa-v1.jsonl", "cmedqa-v2.jsonl", "rerank.jsonl"):
        write_lines(root / name, rerank)
    write_lines(
        root / "sts.jsonl",
        [{"text1": a, "text2": b[:5], "label": int(a == b)} for a in TOPICS for b in TOPICS],
    )
    return root


@pytest.fixture
def encoders() -> Encoders:
    return Encoders()


@pytest.fixture
def pair() -> Pair:
    return load_pair("care-mini")


def test_scores_are_those_of_mteb(
    data: Path, tmp_path: Path, pair: Pair, encoders: Encoders
) -> None:
    found = find_tasks(str(data), "test")
    assert [known.name for known in found] == list(PAPER_COLUMNS)
    system = PairModel(pair, tmp_path / "cache", load=encoders.load)
    for known, mteb_task in found.items():
        score = evaluate_task(system, known, mteb_task, tmp_path / "out")
        result = mteb.evaluate(system, mteb_task, cache=None, co2_tracker=False)
        assert score is not None
        assert score.value == pytest.approx(result.task_results[0].get_score(), abs=1e-5)
        assert 0 < score.value < 1
        assert score.low <= score.value <= score.high
        assert read_score(score_path(tmp_path / "out", pair.name, known.name)) == score


def test_each_side_encodes_with_its_own_encoder(
    data: Path, tmp_path: Path, pair: Pair, encoders: Encoders
) -> None:
    system = PairModel(pair, tmp_path / "cache", load=encoders.load)
    retrieval = task("retrieval")
    evaluate_task(system, retrieval, find_tasks(str(data), "test")[retrieval], tmp_path / "out")
    asked = {encoder.spec.role: encoder.texts for encoder in encoders.made}
    assert sorted(asked["query"]) == sorted(topic[:4] for topic in TOPICS)
    assert len(asked["document"]) == 20


def test_no_text_is_encoded_twice(
    data: Path, tmp_path: Path, pair: Pair, encoders: Encoders
) -> None:
    retrieval = task("retrieval")
    for _ in range(2):
        system = PairModel(pair, tmp_path / "cache", load=encoders.load)
        evaluate_task(system, retrieval, find_tasks(str(data), "test")[retrieval], tmp_path / "out")
    assert sum(len(encoder.texts) for encoder in encoders.made) == 25


def test_a_broken_shard_is_encoded_again(tmp_path: Path, pair: Pair) -> None:
    encoder = CharacterEncoder(pair.query)
    first = encode_cached(lambda: encoder, encoder.spec, TOPICS, tmp_path, batch_size=2, label="x")
    (shard,) = tmp_path.glob("*/*.npy")
    shard.write_bytes(shard.read_bytes()[:100])
    again = encode_cached(lambda: encoder, encoder.spec, TOPICS, tmp_path, batch_size=2, label="x")
    assert np.array_equal(first, again)
    assert len(encoder.texts) == 10


def test_another_prompt_has_vectors_of_its_own(tmp_path: Path, pair: Pair) -> None:
    spec = pair.query.model_copy(update={"prompt": "问："})
    first = encode_cached(
        lambda: CharacterEncoder(pair.query), pair.query, TOPICS, tmp_path, batch_size=2, label="x"
    )
    second = encode_cached(
        lambda: CharacterEncoder(spec), spec, TOPICS, tmp_path, batch_size=2, label="x"
    )
    assert not np.allclose(first, second)


def test_instructions_reach_prompts_that_have_a_place_for_them(pair: Pair) -> None:
    told = pair.query.model_copy(update={"prompt": "Instruct: old\nQuery:"})
    assert with_instruction(told, r"find \1").prompt == "Instruct: find \\1\nQuery:"
    assert with_instruction(pair.query, "find").prompt == pair.query.prompt


def test_bm25_ranks_and_reranks_but_has_no_answer_to_sts(data: Path, tmp_path: Path) -> None:
    found = find_tasks(str(data), "test")
    out = tmp_path / "out"
    scores = {known.name: evaluate_task(Bm25Model(), known, t, out) for known, t in found.items()}
    assert scores["sts"] is None
    rerank = found[task("rerank")]
    assert isinstance(rerank, RankingTask)
    run = read_run(out / "bm25" / "rerank.trec")
    assert {q: set(s) for q, s in run.items()} == {
        q: set(c) for q, c in (rerank.ranking.candidates or {}).items()
    }
    assert scores["retrieval"] is not None and scores["retrieval"].value > 0.6


def run_command(monkeypatch: pytest.MonkeyPatch, *words: str | Path) -> int:
    monkeypatch.setattr(sys, "argv", ["cmedteb", *map(str, words)])
    return command.main()


def test_the_command_scores_compares_and_reports(
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    encoders: Encoders,
) -> None:
    monkeypatch.setattr(
        PairModel.__init__, "__kwdefaults__", {"batch_size": 2, "load": encoders.load}
    )
    out = tmp_path / "out"
    common = ["--data", data, "--out", out]
    status = run_command(
        monkeypatch, "run", *common, "--system", "care-mini", "--system", "bm25",
        "--cache", tmp_path / "cache",
    )  # fmt: skip
    assert status == 0
    table = (out / "table.md").read_text("utf-8")
    assert table in capsys.readouterr().out
    care, bm25 = (line.split(" | ") for line in table.splitlines()[2:4])
    assert bm25[0] == "| bm25" or care[0] == "| bm25"
    mean = sum(s.value for s in read_scores(out)["care-mini"].values()) / 5
    assert f"{100 * mean:.2f}" in table

    assert run_command(monkeypatch, "compare", "care-mini", "bm25", "--out", out) == 0
    assert "| Retrieval |" in capsys.readouterr().out
    assert run_command(monkeypatch, "compare", "care-mini", "no", "--out", out) == 1
    assert "no scores of 'no'" in capsys.readouterr().err

    assert run_command(monkeypatch, "report", *common) == 0
    html = (out / "report.html").read_text("utf-8")
    assert html.count("<svg") == 5
    assert "judged relevant" in html and "高血压少盐饮食" in html


def test_the_picture_is_drawn_of_measured_rates(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    status = run_command(
        monkeypatch, "tradeoff", "--system", "care-mini", "--system", "bm25",
        "--data", data, "--out", out, "--cache", tmp_path / "cache",
    )  # fmt: skip
    assert status == 0
    assert "queries/s" in capsys.readouterr().out
    points = {p["name"]: p for p in json.loads((out / "tradeoff.json").read_text())["points"]}
    assert points["bm25"]["document_bytes"] is None
    document = load_pair("care-mini").folder / "../care-mini/document.onnx"
    assert points["care-mini"]["document_bytes"] == document.stat().st_size
    assert points["care-mini"]["queries_per_second"] > 0
    assert (out / "tradeoff.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (out / "tradeoff.svg").read_text("utf-8")


def test_a_pair_of_two_models_is_asymmetric() -> None:
    pairs = [load_pair(name) for name in ("care-mini", "qwen3-embedding-4b", "bge-m3")]
    assert [is_asymmetric(pair) for pair in pairs] == [True, False, False]


@pytest.mark.parametrize(
    ("name", "message"),
    [("care-mini", "another system is named 'care-mini' too"), ("a/b", "cannot name a folder")],
)
def test_systems_need_names_of_their_own(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], name: str, message: str,
) -> None:  # fmt: skip
    path = tmp_path / "other.toml"
    write_pair(load_pair("care-mini").model_copy(update={"name": name}), path)
    status = run_command(
        monkeypatch, "run", "--system", "care-mini", "--system", path,
        "--data", data, "--out", tmp_path / "out",
    )  # fmt: skip
    assert status == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_an_id_that_no_run_can_hold_leaves_no_score(data: Path, tmp_path: Path) -> None:
    for name in ("corpus.jsonl", "test.qrels.tsv"):
        path = data / "retrieval" / name
        path.write_text(path.read_text("utf-8").replace("d19", "d 19"), "utf-8")
    retrieval, out = task("retrieval"), tmp_path / "out"
    with pytest.raises(CareError, match="'d 19' cannot stand in a TREC run"):
        evaluate_task(Bm25Model(), retrieval, find_tasks(str(data), "test")[retrieval], out)
    assert not list(out.glob("*/*"))


def test_a_system_that_finds_all_pairs_alike_has_no_correlation(
    data: Path, tmp_path: Path, pair: Pair, encoders: Encoders
) -> None:
    same = [{"text1": text, "text2": text, "label": at % 2} for at, text in enumerate(TOPICS)]
    write_lines(data / "sts.jsonl", [row | {"text1": "a", "text2": "a"} for row in same])
    system = PairModel(pair, tmp_path / "cache", load=encoders.load)
    sts, out = task("sts"), tmp_path / "out"
    with pytest.raises(CareError, match="'care-mini' finds all pairs of 'sts' equally alike"):
        evaluate_task(system, sts, find_tasks(str(data), "test")[sts], out)
    assert not out.exists()


def test_a_folder_that_cannot_be_written_is_named(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").write_text("a file")
    words = ["run", "--system", "bm25", "--data", data, "--out", tmp_path / "out"]
    assert run_command(monkeypatch, *words) == 1
    assert f"error: {tmp_path / 'out'}" in capsys.readouterr().err


def test_the_report_of_odd_data(data: Path, tmp_path: Path) -> None:
    folder = data / "odd"
    texts = {"d": "<script>头痛</script>", "e": "骨折"}
    write_lines(folder / "corpus.jsonl", [{"_id": i, "text": t} for i, t in texts.items()])
    write_lines(
        folder / "test.queries.jsonl",
        [{"_id": i, "text": t} for i, t in {"q": "头痛", "r": "<b>其他</b>", "s": "咳嗽"}.items()],
    )
    qrels = folder / "test.qrels.tsv"
    qrels.write_text("q\td\t1\n", "utf-8")
    retrieval, out = task("retrieval"), tmp_path / "out"
    found = find_tasks(str(folder), "test")
    evaluate_task(Bm25Model(), retrieval, found[retrieval], out)
    assert "bm25: no query scores below 1" in html_report(out, found, failures=5)
    # r finds what is not judged, s nothing at all.
    qrels.write_text("q\td\t1\nr\te\t1\ns\te\t1\n", "utf-8")
    found = find_tasks(str(folder), "test")
    evaluate_task(Bm25Model(), retrieval, found[retrieval], out)
    html = html_report(out, found, failures=5)
    assert "&lt;b&gt;其他&lt;/b&gt;" in html and html.count("not found") == 2
    assert "&lt;script&gt;头痛" in html and "<script>" not in html
    with (out / "bm25" / "retrieval.trec").open("a") as run:
        run.write("r Q0 gone 1 3.5 bm25\n")
    with pytest.raises(CareError, match="run of 'bm25' on 'retrieval' names 'gone'"):
        html_report(out, found, failures=5)


def test_systems_scored_on_other_data_are_not_compared(
    data: Path, tmp_path: Path, pair: Pair, encoders: Encoders, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    retrieval, out = task("retrieval"), tmp_path / "out"
    evaluate_task(Bm25Model(), retrieval, find_tasks(str(data), "test")[retrieval], out)
    with (data / "retrieval" / "corpus.jsonl").open("a") as corpus:
        corpus.write(json.dumps({"_id": "more", "text": "more"}) + "\n")
    system = PairModel(pair, tmp_path / "cache", load=encoders.load)
    evaluate_task(system, retrieval, find_tasks(str(data), "test")[retrieval], out)
    assert run_command(monkeypatch, "compare", "bm25", "care-mini", "--out", out) == 1
    assert "scored on different data of 'retrieval'" in capsys.readouterr().err
