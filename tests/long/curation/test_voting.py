"""Precision and recall of votes of one, two and three judges with known error rates.

The relevance judgements of a BEIR folder are the ground truth. Scripted judges invert them at
given rates, and a complete benchmark is built with these judges over HTTP.
"""

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from statsmodels.stats.proportion import proportion_confint

from core.files import write_text
from core.records import read_jsonl, write_json
from core.text import document_text
from curation.benchmark import build_benchmark
from curation.cleaning import clean
from curation.common import markdown_table
from curation.config import BenchmarkConfig
from curation.judging import JUDGEMENTS, Judgement, consensus
from evaluation.beir import beir_paths, check_judged, read_documents, read_qrels, read_queries
from tests.conftest import write_jsonl
from tests.curation.conftest import DOCUMENTS, QUERIES
from tests.curation.endpoints import Body, read_question, scripted_server
from tests.long.curation.conftest import Settings, provenance


@dataclass(frozen=True, slots=True)
class Errors:
    """Error rates of a judge.

    Attributes:
        false_negative: Share of relevant pairs that the judge grades as not relevant.
        false_positive: Share of other pairs that the judge grades as relevant.
        shared: Share of errors that all judges make on the same pairs.
    """

    false_negative: float
    false_positive: float
    shared: float


SCENARIOS = {
    "independent errors": (Errors(0.10, 0.02, 0), Errors(0.15, 0.03, 0), Errors(0.20, 0.01, 0)),
    "half of the errors shared": (
        Errors(0.10, 0.02, 0.5),
        Errors(0.15, 0.02, 0.5),
        Errors(0.20, 0.02, 0.5),
    ),
}
_NAMES = ("first", "second", "third")


def chance(*parts: str) -> float:
    """Returns a pseudo-random number in [0, 1) that depends on `parts` only."""
    digest = hashlib.blake2b("\0".join(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest) / 2**64


def scripted_grade(judge: str, relevant: bool, errors: Errors, query: str, passage: str) -> str:
    """Returns the grade of a judge, which is wrong for pseudo-random pairs at the error rates."""
    rate = errors.false_negative if relevant else errors.false_positive
    both = rate * errors.shared
    alone = (rate - both) / (1 - both)
    errs = chance("all", query, passage) < both or chance("errs", judge, query, passage) < alone
    grades = "SA" if relevant != errs else "BCD"
    return grades[int(chance("grade", judge, query, passage) * len(grades))]


def expected_precision(prevalence: float, errors: Sequence[Errors]) -> float:
    """Returns the precision of a unanimous vote of judges with independent errors."""
    right, wrong = prevalence, 1 - prevalence
    for judge in errors:
        right *= 1 - judge.false_negative
        wrong *= judge.false_positive
    return right / (right + wrong)


def measure_voting(
    settings: Settings, scenarios: Mapping[str, Sequence[Errors]] = SCENARIOS
) -> dict[str, Any]:
    """Builds a benchmark with scripted judges for each scenario and measures their votes.

    Writes the benchmarks, voting.json and voting.md.
    """
    paths = beir_paths(settings.data, settings.split)
    truth = _truth(settings)
    results = []
    for number, (scenario, errors) in enumerate(scenarios.items(), start=1):
        judges = dict(zip(_NAMES, errors, strict=True))
        folder = settings.output / f"benchmark-{number}"
        started = time.perf_counter()
        with scripted_server(partial(_answer, judges=judges, truth=truth)) as url:
            statistics = build_benchmark(_config(settings, folder, url))
        results.append(
            {
                "scenario": scenario,
                "errors": {name: asdict(rates) for name, rates in judges.items()},
                "seconds": round(time.perf_counter() - started, 1),
                "agreement": {
                    key: statistics[key]
                    for key in (
                        *("pairs", "dropped", "fleiss_kappa_grades", "fleiss_kappa_sides"),
                        "krippendorff_alpha_ordinal",
                    )
                },
                "votes": _votes(folder, read_qrels(paths.qrels), judges),
            }
        )
    facts = asdict(settings)
    result = {
        "data": {name: facts[name] for name in ("queries", "split", "depth", "seed")},
        "retrievers": ["bm25", settings.pair],
        **provenance(paths),
        "scenarios": results,
    }
    write_json(settings.output / "voting.json", result)
    write_text(settings.output / "voting.md", _table(result))
    return result


def _truth(settings: Settings) -> frozenset[tuple[str, str]]:
    """Returns the relevant pairs as texts, cleaned like those of the benchmark."""
    paths = beir_paths(settings.data, settings.split)
    queries, qrels = read_queries(paths.queries), read_qrels(paths.qrels)
    documents = {document.id: document for document in read_documents(paths.corpus)}
    check_judged(paths.qrels, qrels, queries, documents)
    cleaned = partial(clean, anonymous=True)
    return frozenset(
        (
            cleaned(queries[query]),
            document_text(cleaned(documents[id_].title), cleaned(documents[id_].text)),
        )
        for query, grades in qrels.items()
        for id_, grade in grades.items()
        if grade > 0
    )


def _answer(
    body: Body, _: object, *, judges: Mapping[str, Errors], truth: frozenset[tuple[str, str]]
) -> str:
    name = body["model"]
    query, passages = read_question(body)
    return json.dumps(
        {
            place: scripted_grade(name, (query, text) in truth, judges[name], query, text)
            for place, text in passages.items()
        }
    )


def _config(settings: Settings, folder: Path, url: str) -> BenchmarkConfig:
    endpoint = {"base_url": url, "concurrency": 2}
    paths = beir_paths(settings.data, settings.split)
    return BenchmarkConfig.model_validate(
        {
            "corpus": paths.corpus,
            "queries": paths.queries,
            "output": folder,
            "retrievers": [
                {"kind": "bm25"},
                {"kind": "pair", "pair": settings.pair, "threads": settings.threads},
            ],
            "judges": [{"name": name, "model": name, **endpoint} for name in _NAMES],
            "passage_chars": 100_000,
            "splits": {settings.split: None},
            "disputed": "keep",
            "pool": "union",
            "query_limit": settings.queries,
            "depth": settings.depth,
            "seed": settings.seed,
        }
    )


def _votes(
    folder: Path, qrels: Mapping[str, Mapping[str, int]], judges: Mapping[str, Errors]
) -> list[dict[str, Any]]:
    """Returns the votes of the first judge, the first two, and all three on the same pairs."""
    pairs = [
        (
            Judgement(record["query-id"], record["corpus-id"], record["grades"]),
            qrels.get(record["query-id"], {}).get(record["corpus-id"], 0) > 0,
        )
        for _, record in read_jsonl(folder / JUDGEMENTS)
    ]
    relevant = sum(truth for _, truth in pairs)
    rows = []
    for count in range(1, len(judges) + 1):
        names = list(judges)[:count]
        verdicts = [
            (consensus([judgement.grades[name] for name in names]), truth)
            for judgement, truth in pairs
        ]
        positive = [truth for verdict, truth in verdicts if verdict == "positive"]
        negative = [truth for verdict, truth in verdicts if verdict == "negative"]
        independent = not any(judges[name].shared for name in names)
        rows.append(
            {
                "judges": count,
                "pairs": len(pairs),
                "relevant": relevant,
                "positives": len(positive),
                "precision": _share(positive),
                "precision_95": [
                    round(float(end), 4)
                    for end in proportion_confint(sum(positive), len(positive), method="wilson")
                ]
                if positive
                else None,
                "expected_precision": expected_precision(
                    relevant / len(pairs), [judges[name] for name in names]
                )
                if independent
                else None,
                "recall": sum(positive) / relevant if relevant else None,
                "negative_precision": _share([not truth for truth in negative]),
                "dropped": len(pairs) - len(positive) - len(negative),
            }
        )
    return rows


def _table(result: Mapping[str, Any]) -> str:
    header = (
        *("errors", "judges", "pairs", "relevant", "positives", "precision", "95 %"),
        *("expected if independent", "recall", "precision of negatives", "dropped"),
    )
    rows = [
        (
            scenario["scenario"],
            *(_cell(value) for value in row.values()),
        )
        for scenario in result["scenarios"]
        for row in scenario["votes"]
    ]
    return markdown_table(header, rows)


def _share(values: Sequence[bool]) -> float | None:
    return sum(values) / len(values) if values else None


def _cell(value: Any) -> object:
    if value is None:
        return "–"
    return " to ".join(f"{end:.3f}" for end in value) if isinstance(value, list) else value


def rate(relevant: bool, errors: Errors, judge: str = "one") -> list[bool]:
    """Returns whether a judge errs, for many pairs."""
    grades = (scripted_grade(judge, relevant, errors, "q", str(i)) for i in range(20_000))
    return [(grade in "SA") != relevant for grade in grades]


@pytest.mark.parametrize("shared", [0, 0.5])
@pytest.mark.parametrize("relevant", [True, False])
def test_scripted_judges_err_at_their_rates(relevant: bool, shared: float) -> None:
    errors = Errors(false_negative=0.2, false_positive=0.05, shared=shared)
    expected = 0.2 if relevant else 0.05
    one, two = (np.array(rate(relevant, errors, judge)) for judge in ("one", "two"))
    assert one.mean() == pytest.approx(expected, abs=0.01)
    both = (one & two).mean()
    alone = (expected - shared * expected) / (1 - shared * expected)
    assert both == pytest.approx(shared * expected + (1 - shared * expected) * alone**2, abs=0.005)


def test_expected_precision_by_hand() -> None:
    half = Errors(0.5, 0.1, 0)
    assert expected_precision(0.2, [half]) == pytest.approx(0.1 / (0.1 + 0.08))
    assert expected_precision(0.2, [half, half]) == pytest.approx(0.05 / (0.05 + 0.008))


def test_votes_on_a_few_documents(data: Path, settings: Settings, tmp_path: Path) -> None:
    rows = [{"_id": id_, "title": "问答", "text": text} for id_, text in DOCUMENTS.items()]
    write_jsonl(data / "corpus.jsonl", rows)
    asked = QUERIES | {"q3": "骨折以后多久能走路"}
    write_jsonl(data / "queries.jsonl", [{"_id": id_, "text": t} for id_, t in asked.items()])
    liar, honest = Errors(0, 1, 0), Errors(0, 0, 0)
    few = replace(settings, data=data, split="test", depth=5, output=tmp_path / "out")
    result = measure_voting(few, {"one liar": (liar, honest, honest)})
    one, two, three = result["scenarios"][0]["votes"]
    # All fifteen pairs are judged; three are relevant, none of the third question's.
    assert (one["pairs"], one["relevant"], one["positives"], one["precision"]) == (15, 3, 15, 0.2)
    assert (two["positives"], two["precision"], two["dropped"]) == (3, 1.0, 12)
    assert three["recall"] == 1.0
    assert one["expected_precision"] == pytest.approx(0.2)
    assert "one liar" in (tmp_path / "out" / "voting.md").read_text("utf-8")


@pytest.mark.timeout(3600)
def test_voting(settings: Settings) -> None:
    result = measure_voting(settings)
    print((settings.output / "voting.md").read_text("utf-8"))
    independent, shared = (scenario["votes"] for scenario in result["scenarios"])
    for row in independent:
        low, high = row["precision_95"]
        assert low <= row["expected_precision"] <= high
    precision = [row["precision"] for row in independent]
    assert precision == sorted(precision)
    # Shared errors remain in every vote.
    assert shared[-1]["precision"] < precision[-1]
