"""Tables of figures in documents, from the results of commands."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"
# What `make quality` writes.
QUALITY = RESULTS / "quality" / "splits.json"
ENCODERS = [RESULTS / "quality" / f"encoders-{threads}.json" for threads in (1, 2)]
BENCH = ROOT / "loadtest" / "results" / "bench.json"
# What tables call systems and splits; others keep their names.
_SYSTEMS = {
    "care-mini": "`care-mini`",
    "care-mini-lookup": "`care-mini-lookup`",
    "care-mini-edition-3": "third edition of `care-mini`",
    "bm25": "BM25 over jieba's words",
    "bm25-characters": "BM25 over characters and bigrams",
}
_WRITERS = {
    "e1": "patients of all kinds",
    "e2": "typed and dictated in a hurry",
    "e3": "young people online",
    "e4": "people of the south",
}
_SPLITS = {
    "unseen": "questions of patients",
    "held-out-knowledge": "questions of a knowledge base",
    "held-out-described": "descriptions by patients",
    "held-out-reworded": "reworded by rules",
    "held-out-spoken": "rewritten by hand, 73",
    "held-out-asked": "the same as asked",
    "held-out-keywords-ke": "one to three words",
    "dev": "dev",
}
for _writer, _manner in _WRITERS.items():
    _SPLITS[f"held-out-rewrites-{_writer}-spoken"] = f"rewritten by {_writer}: {_manner}"
    _SPLITS[f"held-out-rewrites-{_writer}-asked"] = "the same as asked"
# Those of the texts in patients' own words, by writers of whom no text trains.
_SPOKEN = [f"held-out-rewrites-{writer}-spoken" for writer in _WRITERS]
# Words of the first table in README.zh.md.
_CHINESE = {
    r"nDCG@10, in patients' words": "nDCG@10（口语）",
    r"third edition of (`.*?`)": r"\1 第三版",
    r"BM25 over jieba's words": "BM25（jieba 分词）",
    r"BM25 over characters and bigrams": "BM25（单字和二字组）",
    r"By (`.*?`) at (\w+), (.*?), (\d+) processors \((.*)\)\.": (
        r"\1，提交 \2，\3，\4 个处理器（\5）。"
    ),
}


def quality() -> str:
    """Returns all measures on dev, and nDCG@10 on questions in patients' own words."""
    result = _read(QUALITY)
    names = list(result["systems"][0]["measures"]["dev"])
    counts = [result["queries"][name] for name in _SPOKEN]
    head = ("", *names, "nDCG@10, in patients' words")
    rows = [
        [
            _system(system),
            *(_share(system["measures"]["dev"][name]) for name in names),
            _share(
                fmean((system["measures"][name]["nDCG@10"] for name in _SPOKEN), weights=counts)
            ),
        ]
        for system in result["systems"]
    ]
    return _table(head, rows, _source(result, "make quality"))


def quality_in_chinese() -> str:
    """Returns the table of `quality` for README.zh.md."""
    text = quality()
    for english, chinese in _CHINESE.items():
        text, found = re.subn(english, chinese, text)
        assert found, english
    return text


def splits() -> str:
    """Returns nDCG@10 on all splits, the third edition's difference, and what rewriting costs."""
    result = _read(QUALITY)
    systems = {system["name"]: system for system in result["systems"]}
    other = systems["care-mini-edition-3"]
    head = (
        "nDCG@10 × 100",
        "queries",
        *map(_system, result["systems"]),
        "third edition − `care-mini`",
    )
    rows = []
    for name, count in result["queries"].items():
        scores = (system["splits"][name]["ndcg@10"]["value"] for system in systems.values())
        difference = _interval(other["splits"][name]["difference"])
        each = (f"{100 * score:.2f}" for score in scores)
        rows.append([_SPLITS.get(name, name), f"{count:,}", *each, difference])
    for name in other["loss"]:
        losses = (_percent(system["loss"][name]) for system in systems.values())
        label = f"loss, {_SPLITS.get(f'{name}-spoken', name)}"
        rows.append([label, "", *losses, ""])
    return _table(head, rows, _source(result, "make quality"))


def lookup() -> str:
    """Returns nDCG@10 of the lookup encoder beside that of care-mini, on each split."""
    result = _read(QUALITY)
    pair, by_lookup = (
        next(system["splits"] for system in result["systems"] if system["name"] == name)
        for name in ("care-mini", "care-mini-lookup")
    )
    rows = []
    for name, count in result["queries"].items():
        both = [splits[name]["ndcg@10"]["value"] for splits in (pair, by_lookup)]
        label = f"{_SPLITS.get(name, name)} ({count:,})"
        rows.append([label, *(f"{100 * score:.2f}" for score in both), _percent(both[1] / both[0])])
    head = ("nDCG@10 × 100", "`care-mini`", "`care-mini-lookup`", "share")
    return _table(head, rows, _source(result, "make quality"))


def encoders() -> str:
    """Returns the speed of the query encoders, alone and in batches."""
    found = [_read(path) for path in ENCODERS]
    first = found[0]
    numbers = " / ".join(str(result["threads"]) for result in found)
    head = (
        "query encoder",
        f"query alone [ms], {numbers} threads",
        f"queries/s in batches of {first['batch']}, {numbers} threads",
        "MB",
    )
    rows = []
    for i, entry in enumerate(first["encoders"]):
        each = [result["encoders"][i] for result in found]
        alone = " / ".join(f"{encoder['alone']['ms']:.2f}" for encoder in each)
        rates = " / ".join(f"{1000 / encoder['batches']['ms']:,.0f}" for encoder in each)
        rows.append([_system(entry), alone, rates, f"{entry['megabytes']:.1f}"])
    return _table(head, rows, _source(first | first["hardware"], "make quality"))


def speed() -> str:
    """Returns the speed of the modes of search over HTTP, in a sentence."""
    found = _read(BENCH)
    medians = found["scenarios"]["modes"]["medians"]
    each = [
        f"{mode} {medians[f'{mode}_p50_ms']:.1f} ms, {medians[f'{mode}_qps']:,.0f} queries/s"
        for mode in ("hybrid", "dense", "lexical")
    ]
    facts = found["environment"]
    source = _source(facts | facts["hardware"], "make bench ONLY=modes")
    clients = f"one client, rate with {found['options']['connections']} on the same processors"
    return f"Median with {clients}: {'; '.join(each)}. {source}"


def curation(name: str) -> str:
    """Returns a table that a test of curation has written beside its JSON."""
    return (RESULTS / "curation" / f"{name}.md").read_text("utf-8").strip()


TABLES: Mapping[str, Callable[[], str]] = {
    "quality": quality,
    "quality-zh": quality_in_chinese,
    "splits": splits,
    "lookup": lookup,
    "encoders": encoders,
    "speed": speed,
    "voting": lambda: curation("voting"),
    "diversity": lambda: curation("diversity"),
}


def _read(path: Path) -> Any:
    return json.loads(path.read_text("utf-8"))


def _system(entry: Mapping[str, Any]) -> str:
    name: str = entry.get("name") or entry["pair"]
    return _SYSTEMS.get(Path(name).stem, name)


def _share(value: float) -> str:
    return f"{value:.4f}".removeprefix("0")


def _percent(value: float) -> str:
    return f"{100 * value:.0f} %"


def _interval(difference: Mapping[str, float]) -> str:
    value, low, high = (100 * difference[name] for name in ("value", "low", "high"))
    return f"{value:+.2f} ({low:+.2f} to {high:+.2f})".replace("-", "−")


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], source: str) -> str:
    return "\n".join([*_lines(head, rows), "", source])


def _lines(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|---|{'---:|' * (len(head) - 1)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def _source(result: Mapping[str, Any], command: str) -> str:
    """Returns a sentence that names the command, the commit and the machine of a result."""
    commit = result["commit"]
    changed = ", with uncommitted changes" if commit["changed"] else ""
    kind = ", ".join([result["processor"], *result.get("instructions", [])])
    machine = f"{result['processors']} processors ({kind})"
    return f"By `{command}` at {commit['id'][:7]}{changed}, {result['date'][:10]}, {machine}."
