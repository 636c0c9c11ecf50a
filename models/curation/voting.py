"""What the voting rule is worth: judges with known errors, one, two and three of them.

The relevance judgements of a BEIR folder stand for the truth. Scripted judges turn it over at
given rates, and a benchmark is built with them from end to end, over HTTP.
"""

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from statsmodels.stats.proportion import proportion_confint

from core.files import write_text
from core.text import document_text
from models.curation import prompts
from models.curation.benchmark import build_benchmark
from models.curation.config import BenchmarkConfig
from models.curation.judging import Judgement, consensus
from models.curation.records import (
    beir_files,
    markdown_table,
    provenance,
    write_json,
)
from models.curation.scripted import Body, scripted_server
from models.curation.washing import wash
from models.curation.work import JUDGEMENTS
from models.evaluation.beir import check_judged, read_documents, read_qrels, read_queries
from models.jsonl import read_jsonl


@dataclass(frozen=True, slots=True)
class Errors:
    """How often a judge is wrong.

    Attributes:
        missed: Share of the relevant pairs that it does not call relevant.
        invented: Share of the other pairs that it calls relevant.
        shared: Share of its errors that all judges make together, on the same pairs.
    """

    missed: float
    invented: float
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
    """Returns a number in [0, 1) that looks random and depends on `parts` alone."""
    digest = hashlib.blake2b("\0".join(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest) / 2**64


def scripted_grade(judge: str, relevant: bool, errors: Errors, query: str, passage: str) -> str:
    """Returns a grade: of the right side unless the judge errs, which the texts alone decide."""
    rate = errors.missed if relevant else errors.invented
    both = rate * errors.shared
    alone = (rate - both) / (1 - both)
    errs = chance("all", query, passage) < both or chance("errs", judge, query, passage) < alone
    grades = "SA" if relevant != errs else "BCD"
    return grades[int(chance("grade", judge, query, passage) * len(grades))]


def expected_precision(prevalence: float, errors: Sequence[Errors]) -> float:
    """Returns the precision of a unanimous vote of judges that err independently."""
    right, wrong = prevalence, 1 - prevalence
    for judge in errors:
        right *= 1 - judge.missed
        wrong *= judge.invented
    return right / (right + wrong)


def measure_voting(
    data: Path,
    output: Path,
    *,
    split: str,
    queries: int,
    depth: int,
    seed: int,
    pair: str,
    threads: int,
) -> dict[str, Any]:
    """Builds a benchmark with scripted judges for each scenario and measures votes of its judges.

    Args:
        data: A BEIR folder: corpus.jsonl, {split}.queries.jsonl, {split}.qrels.tsv.
        output: Folder for the benchmarks, voting.json and voting.md.
        split: The split.
        queries: Questions that are sampled.
        depth: Documents of each retriever.
        seed: Of the sample.
        pair: The pair that retrieves, beside BM25.
        threads: Of encoder and search.

    Raises:
        CareError: If the data cannot be read.
    """
    truth = _truth(data, split)
    results = []
    for number, (scenario, errors) in enumerate(SCENARIOS.items(), start=1):
        judges = dict(zip(_NAMES, errors, strict=True))
        folder = output / f"benchmark-{number}"
        started = time.perf_counter()
        with scripted_server(partial(_answer, judges=judges, truth=truth)) as url:
            sample = {"split": split, "query_limit": queries, "depth": depth, "seed": seed}
            retriever = {"kind": "pair", "pair": pair, "threads": threads}
            statistics = build_benchmark(_config(data, folder, url, retriever, sample))
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
                "votes": _votes(folder, read_qrels(data / f"{split}.qrels.tsv"), judges),
            }
        )
    result = {
        "data": {"queries": queries, "split": split, "depth": depth, "seed": seed},
        "retrievers": ["bm25", pair],
        **provenance(beir_files(data, split)),
        "scenarios": results,
    }
    write_json(output / "voting.json", result)
    write_text(output / "voting.md", _table(result))
    return result


def _truth(data: Path, split: str) -> frozenset[tuple[str, str]]:
    """Returns the relevant pairs as texts, washed as the benchmark's are."""
    queries = read_queries(data / f"{split}.queries.jsonl")
    documents = {document.id: document for document in read_documents(data / "corpus.jsonl")}
    path = data / f"{split}.qrels.tsv"
    qrels = read_qrels(path)
    check_judged(path, qrels, queries, documents)
    washed = partial(wash, anonymous=True)
    return frozenset(
        (
            washed(queries[query]),
            document_text(washed(documents[id_].title), washed(documents[id_].text)),
        )
        for query, grades in qrels.items()
        for id_, grade in grades.items()
        if grade > 0
    )


def _answer(
    body: Body, _: object, *, judges: Mapping[str, Errors], truth: frozenset[tuple[str, str]]
) -> str:
    name = body["model"]
    query, passages = prompts.read_judge_question(body["messages"][1]["content"])
    return json.dumps(
        {
            place: scripted_grade(name, (query, text) in truth, judges[name], query, text)
            for place, text in passages.items()
        }
    )


def _config(
    data: Path, folder: Path, url: str, retriever: Mapping[str, Any], sample: Mapping[str, Any]
) -> BenchmarkConfig:
    endpoint = {"base_url": url, "concurrency": 2}
    return BenchmarkConfig.model_validate(
        {
            "corpus": data / "corpus.jsonl",
            "queries": data / f"{sample['split']}.queries.jsonl",
            "output": folder,
            "retrievers": [{"kind": "bm25"}, retriever],
            "judges": [{"name": name, "model": name, **endpoint} for name in _NAMES],
            "passage_chars": 100_000,
            **sample,
        }
    )


def _votes(
    folder: Path, qrels: Mapping[str, Mapping[str, int]], judges: Mapping[str, Errors]
) -> list[dict[str, Any]]:
    """Returns what the first judge alone, the first two, and all three make of the same pairs."""
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
