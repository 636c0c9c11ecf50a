"""Systems compared by their runs on the same judged queries."""

import re
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from core.records import write_tsv
from evaluation.beir import Qrels, Run
from evaluation.bm25 import LABELS, SYSTEMS
from evaluation.metrics import MEASURES, means, score_all, write_run
from evaluation.statistics import Difference, Interval, mean_interval, paired_difference

NDCG = "nDCG@10"
_RUN_NAMES = {LABELS[analyzer]: name for name, analyzer in SYSTEMS.items()}


@dataclass(frozen=True, slots=True)
class Comparison:
    """Scores of systems on the same judged queries."""

    baseline: str  # the system that the others are compared with
    runs: dict[str, Run]  # scores of documents by query, by system
    # Values by query, by the names of `evaluation.metrics.MEASURES`, by system.
    by_query: dict[str, dict[str, dict[str, float]]]
    scores: dict[str, dict[str, float]]  # their means, by system
    intervals: dict[str, Interval]  # nDCG@10 with its interval, by system
    # Difference of nDCG@10 to the baseline, of each other system.
    differences: dict[str, Difference]

    @property
    def queries(self) -> list[str]:
        """The ids of the judged queries."""
        return list(self.by_query[self.baseline][NDCG])

    def ndcg(self, system: str) -> list[float]:
        """Returns nDCG@10 of each judged query, in the order of the judgements."""
        return list(self.by_query[system][NDCG].values())

    def as_json(self) -> dict[str, Any]:
        """Returns all fields but the runs; of the values by query, those of nDCG@10."""
        return {
            "scores": self.scores,
            "intervals": {name: asdict(found) for name, found in self.intervals.items()},
            "ndcg_by_query": {name: values[NDCG] for name, values in self.by_query.items()},
            "baseline": self.baseline,
            "differences": {name: asdict(found) for name, found in self.differences.items()},
        }

    def write_per_query(self, path: Path) -> None:
        """Writes a TSV with a line for each system and query, and a column for each measure."""
        rows = [
            (system, query, *(values[name][query] for name in MEASURES))
            for system, values in self.by_query.items()
            for query in values[NDCG]
        ]
        write_tsv(path, [("system", "query-id", *MEASURES), *rows])

    def write_runs(self, folder: Path, systems: Collection[str]) -> None:
        """Writes SYSTEM.trec of each of some systems; the names have no white space."""
        for system in systems:
            name = run_name(system)
            write_run(folder / f"{name}.trec", self.runs[system], name)


def run_name(system: str) -> str:
    """Returns the name of a system in files and in runs."""
    return _RUN_NAMES.get(system, re.sub(r"[^\w.+-]+", "-", system.replace(" + ", "+")))


def compare_runs(qrels: Qrels, runs: Mapping[str, Run], baseline: str) -> Comparison:
    """Scores runs by system on all judged queries, and compares each with the baseline."""
    by_query = {name: score_all(qrels, run) for name, run in runs.items()}
    ndcg = {name: list(values[NDCG].values()) for name, values in by_query.items()}
    return Comparison(
        baseline=baseline,
        runs=dict(runs),
        by_query=by_query,
        scores={name: means(values) for name, values in by_query.items()},
        intervals={name: mean_interval(values) for name, values in ndcg.items()},
        differences={
            name: paired_difference(values, ndcg[baseline])
            for name, values in ndcg.items()
            if name != baseline
        },
    )
