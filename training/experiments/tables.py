"""Tables of the paper beside the scores of the recipes that stand for their rows.

`tables.toml` of a folder of recipes holds the tables. Nothing here needs torch or SciPy, so that
the documents can be generated without them.
"""

import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev, variance
from typing import Any

from pydantic import Field, ValidationError

from core.records import read_text
from training.errors import TrainingError
from training.schema import Settings

TABLES = "tables.toml"
# Differences of means up to this size count as equal.
MARGIN = 0.01
_DECIDED = ("higher", "lower")
# Contents of scores.json: facts, scores by recipe, measure and seed, and differences.
Summary = Mapping[str, Any]


class Row(Settings):
    """A row of a table."""

    recipe: str  # name of the recipe, or `NAME@DIMENSIONS` for cut vectors of its pairs
    label: str
    # The paper's scores in percent, in the order of the measures; may be fewer.
    paper: list[float] = Field(default_factory=list)
    reference: str = ""  # recipe that the row is compared with, instead of the table's
    why: str = ""  # the likely reason why the result is not the paper's


class Table(Settings):
    """A table of rows that are compared with the row `reference`."""

    title: str
    reference: str
    note: str = ""
    rows: list[Row]

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """The recipes that are compared: a reference, and the recipe of a row."""
        pairs = [(row.reference or self.reference, row.recipe) for row in self.rows]
        return [(reference, recipe) for reference, recipe in pairs if reference != recipe]


class Share(Settings):
    """The share of the score of `of` that `recipe` reaches; `paper` holds the scores of both."""

    recipe: str
    of: str
    paper: tuple[list[float], list[float]]


class Other(Settings):
    """A result of the paper that no recipe stands for."""

    table: str
    paper: str
    here: str
    command: str
    missing: str


class Tables(Settings):
    """Contents of `tables.toml`."""

    measures: list[str] = Field(default_factory=list)
    tables: list[Table] = Field(default_factory=list)
    others: list[Other] = Field(default_factory=list)
    share: Share | None = None

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """The recipes that are compared in any table, without repetitions."""
        return list(dict.fromkeys(pair for table in self.tables for pair in table.pairs))

    @property
    def recipes(self) -> list[str]:
        """The recipes of all rows, in the order of their first row."""
        return list(dict.fromkeys(row.recipe for table in self.tables for row in table.rows))


def read_tables(folder: Path) -> Tables:
    """Reads the tables of a folder of recipes; a folder without `tables.toml` has none."""
    path = folder / TABLES
    if not path.is_file():
        return Tables()
    try:
        return Tables.model_validate(tomllib.loads(read_text(path)))
    except tomllib.TOMLDecodeError as error:
        raise TrainingError.at(path, str(error), "invalid_value") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        reason = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise TrainingError.at(path, reason, "invalid_value") from error


def render(tables: Tables, summary: Summary) -> str:
    """Returns all tables as Markdown, each below a heading; scores are in percent."""
    if summary["scores"]:
        blocks = [_counts(tables, summary), _seeds(tables, summary), _share(tables, summary)]
        blocks += [render_conditions(summary)]
    else:
        blocks = ["**The recipes have not been run yet: all figures are the paper's.**"]
    for table in tables.tables:
        name = next((r.label for r in table.rows if r.recipe == table.reference), table.reference)
        lines = [
            f"| | | paper | here | paper: {name} − row | here: {name} − row (95 %) | |",
            "|---|---|---:|---:|---:|---:|---|",
            *_lines(tables, table, summary),
        ]
        reasons = [f"- {row.label}: {row.why}" for row in table.rows if row.why]
        blocks += [f"## {table.title}", table.note.strip(), "\n".join(lines), "\n".join(reasons)]
    return "\n\n".join(block for block in blocks if block) + "\n"


def render_others(tables: Tables) -> str:
    """Returns the results of the paper that no recipe stands for, as Markdown."""
    lines = ["| | paper | here | command | not run |", "|---|---|---|---|---|"]
    for other in tables.others:
        cells = (other.table, other.paper, other.here, f"`{other.command}`", other.missing)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def render_conditions(summary: Summary) -> str:
    """Returns a sentence on test data, hardware and libraries."""
    facts = summary["facts"]
    libraries = ", ".join(f"{name} {number}" for name, number in facts["libraries"].items())
    return (
        f"{facts['questions']:,} questions, {facts['documents']:,} documents to search, "
        f"{facts['candidates']} to rerank; {facts['stages']} stages, {facts['stage_minutes']} "
        f"minutes on {facts['gpu'] or facts['processor']} with {facts['threads']} thread(s); "
        f"Python {facts['python']}, {libraries}."
    )


def statistics(
    summary: Summary, recipe: str, measure: str
) -> tuple[float, float | None, int] | None:
    """Returns mean and deviation over seeds in percent, and their number; None if not run."""
    found = summary["scores"].get(recipe)
    if not found:
        return None
    values = [100 * value for value in found[measure].values()]
    return fmean(values), stdev(values) if len(values) > 1 else None, len(values)


def result(found: Mapping[str, Any] | None, paper: float | None) -> str:
    """Returns what a measured difference says of the paper's, or of the two rows without one."""
    if found is None:
        return "not run"
    verdict = found["verdict"]
    if verdict == "equal":
        return "equal within ±1 point"
    if verdict == "undecided":
        return f"undecided; decided by about {found['needed']:,} questions"
    if paper is None:
        return "row is lower" if verdict == "higher" else "row is higher"
    return "reproduces" if (verdict == "higher") == (paper > 0) else "contradicts"


def _lines(tables: Tables, table: Table, summary: Summary) -> Iterator[str]:
    papers = {row.recipe: row.paper for row in table.rows}
    labels = {row.recipe: row.label for row in table.rows}
    for row in table.rows:
        reference = row.reference or table.reference
        for number, measure in enumerate(tables.measures):
            score = statistics(summary, row.recipe, measure)
            cells = [
                row.label if number == 0 else "",
                measure,
                _paper(row.paper, number),
                _score(score),
            ]
            if reference == row.recipe:
                cells += ["", "", ""]
            else:
                claimed = _claimed(papers, reference, row.recipe, number)
                found = _difference(summary, reference, row.recipe, measure)
                other = "" if reference == table.reference else f" ({labels[reference]} − row)"
                cells += [
                    "–" if claimed is None else f"{claimed:+.2f}{other}",
                    _interval(found),
                    result(found, claimed),
                ]
            yield f"| {' | '.join(cells)} |"


def _paper(scores: Sequence[float], number: int) -> str:
    return f"{scores[number]:.2f}" if number < len(scores) else "–"


def _score(found: tuple[float, float | None, int] | None) -> str:
    if found is None:
        return "not run"
    mean, deviation, _ = found
    return f"{mean:.1f}" if deviation is None else f"{mean:.1f} ± {deviation:.1f}"


def _claimed(
    papers: Mapping[str, Sequence[float]], reference: str, recipe: str, number: int
) -> float | None:
    first, second = papers.get(reference, ()), papers.get(recipe, ())
    return first[number] - second[number] if number < min(len(first), len(second)) else None


def _difference(
    summary: Summary, reference: str, recipe: str, measure: str
) -> Mapping[str, Any] | None:
    key = (reference, recipe, measure)
    found: list[Mapping[str, Any]] = summary["differences"]
    return next((d for d in found if (d["first"], d["second"], d["measure"]) == key), None)


def _interval(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return "–"
    value, low, high = (100 * found[name] for name in ("value", "low", "high"))
    return f"{value:+.1f} ({low:+.1f} to {high:+.1f})"


def _counts(tables: Tables, summary: Summary) -> str:
    """Returns how many of the paper's differences are reproduced."""
    results: Counter[str] = Counter()
    seen = set()
    for table in tables.tables:
        papers = {row.recipe: row.paper for row in table.rows}
        for reference, recipe in table.pairs:
            for number, measure in enumerate(tables.measures):
                claimed = _claimed(papers, reference, recipe, number)
                if claimed is None or (reference, recipe, measure) in seen:
                    continue
                seen.add((reference, recipe, measure))
                found = _difference(summary, reference, recipe, measure)
                results[result(found, claimed).partition(";")[0]] += 1
    if not results:
        return ""
    counts = ", ".join(f"{count} {name}" for name, count in results.most_common())
    return f"Differences that the paper reports: {sum(results.values())}; here {counts}."


def _seeds(tables: Tables, summary: Summary) -> str:
    """Returns how far a seed moves a score, and which decided differences may be due to it."""
    deviations: list[str] = []
    open_: dict[str, None] = {}
    for measure in tables.measures:
        scores = (
            [100 * value for value in found[measure].values()]
            for name, found in summary["scores"].items()
            if "@" not in name  # cut vectors are of the same training
        )
        several = [values for values in scores if len(values) > 1]
        if not several:
            return ""
        freedom = sum(len(values) - 1 for values in several)
        pooled = sum((len(values) - 1) * variance(values) for values in several) / freedom
        deviations.append(f"{sqrt(pooled):.1f} in {measure}")
        for table in tables.tables:
            for row in table.rows:
                found = _difference(summary, row.reference or table.reference, row.recipe, measure)
                if found is None or "@" in row.recipe or found["verdict"] not in _DECIDED:
                    continue
                # Two means of as many seeds differ by more in one of twenty comparisons.
                if abs(100 * found["value"]) < 1.96 * sqrt(2 * pooled / found["seeds"]):
                    open_[f"{table.title.partition(':')[0]}, {row.label}: {measure}"] = None
    listed = "".join(f"\n- {name}" for name in open_)
    return (
        "The intervals are over questions. Another seed moves a score too: its deviation, of "
        f"{len(several)} recipes with several seeds, is {' and '.join(deviations)}. So these "
        f"differences, though their intervals exclude 0, are no larger than seeds alone can make "
        f"them, and need more seeds:\n{listed}"
        if open_
        else ""
    )


def _share(tables: Tables, summary: Summary) -> str:
    share = tables.share
    if share is None:
        return ""
    parts = []
    for number, measure in enumerate(tables.measures):
        own, whole = (statistics(summary, name, measure) for name in (share.recipe, share.of))
        if own is None or whole is None:
            return ""
        paper = 100 * share.paper[0][number] / share.paper[1][number]
        here = 100 * own[0] / max(whole[0], 1e-7)
        parts.append(f"{here:.1f} % in {measure} (paper {paper:.1f} %)")
    return f"CARE reaches {' and '.join(parts)} of the large encoder on both sides."
