"""The results as JSON, and the tables that are made from all results of a folder."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loadtest.bench.curves import read_results

BENCH_NAME, BUILD_NAME, TABLE_NAME = "bench.json", "build.json", "README.md"

_SIGNS = {">=": "≥", "<=": "≤"}
_FIGURES_HEAD = [
    "| figure | reached | goal | met | command | what it is made of, what limits it |",
    "|---|---|---|---|---|---|",
]


def write(result: dict[str, Any], path: Path) -> Path:
    """Writes a result, and the tables of all results beside it; returns the tables' path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(result, ensure_ascii=False, indent=1)
    path.write_text(text + "\n", encoding="utf-8")
    tables = path.with_name(TABLE_NAME)
    tables.write_text(_tables(path.parent), encoding="utf-8")
    return tables


def _tables(folder: Path) -> str:
    """The results in a folder as Markdown."""
    lines = ["# Results", ""]
    bench = folder / BENCH_NAME
    if bench.is_file():
        lines += _bench(json.loads(bench.read_text(encoding="utf-8")))
    for path in sorted(folder.glob("start-*.json")):
        lines += _start(json.loads(path.read_text(encoding="utf-8")), path.name)
    build = folder / BUILD_NAME
    if build.is_file():
        lines += _build(json.loads(build.read_text(encoding="utf-8")))
    scales = read_results(folder)
    if scales:
        lines += _scale(scales)
    return "\n".join(lines).rstrip("\n") + "\n"


def _bench(result: dict[str, Any]) -> list[str]:
    options = result["options"]
    lines = [
        "## Over HTTP",
        "",
        f"Written by `make bench`; every round is in [{BENCH_NAME}]({BENCH_NAME}).",
        "",
        *_environment(result["environment"]),
        f"- The load comes from the same processors. Index {options['index']}, pair "
        f"{options['pair']}, {options['rounds']} alternating rounds of {options['seconds']} s; "
        "medians.",
        "",
        *_FIGURES_HEAD,
    ]
    for name, scenario in result["scenarios"].items():
        command = f"`make bench ONLY={name}`"
        if "error" in scenario:
            first = scenario["error"].splitlines()[0]
            lines.append(_row(name, "not measured", "", "no", command, first))
        lines += [_figure_row(figure, command) for figure in scenario.get("figures", [])]
    return [*lines, ""]


def _start(result: dict[str, Any], name: str) -> list[str]:
    options = result["options"]
    command = f"`make bench-start VECTORS={options['vectors']}`"
    index = sum(result["index_bytes"].values())
    return [
        f"## Start with {options['vectors']:,} × {options['dimension']}",
        "",
        f"Written by {command}; every start, the stages and the imports are in "
        f"[{name}]({name}). Synthetic vectors, HNSW{options['links']},SQ8, "
        f"{index / 2**30:.2f} GiB of files.",
        "",
        *_environment(result["environment"]),
        "",
        *_FIGURES_HEAD,
        *(_figure_row(figure, command) for figure in result["figures"]),
        "",
    ]


def _build(result: dict[str, Any]) -> list[str]:
    options = result["options"]
    lines = [
        "## Builds",
        "",
        "Written by `make bench-build DOCUMENTS=…`, with an encoder that costs next to nothing: "
        f"what all else takes. {options['dimension']} dimensions, {options['threads']} threads, "
        f"shards of {options['shard_size']}, {options['memory_gib']:g} GiB for inverted lists; "
        f"all figures are in [{BUILD_NAME}]({BUILD_NAME}). "
        "*Own* memory is that without pages of mapped files, which is given back when it is "
        "needed; each phase is a process.",
        "",
        *_environment(result["environment"]),
        "",
        "| documents | phase | s | processor s | own MiB at most | resident MiB at most | |",
        "|---|---|---|---|---|---|---|",
    ]
    for size in result["sizes"]:
        for name, phase in size["phases"].items():
            note = ""
            if "factory" in phase:
                note = f"{phase['factory']}: {phase['vectors_bytes'] >> 20:,} MiB"
            lines.append(
                _row(
                    f"{size['documents']:,}",
                    name,
                    f"{phase['seconds']:.0f}",
                    f"{phase['processor_seconds']:.0f}",
                    f"{phase['peak_own_bytes'] >> 20:,}",
                    f"{phase['peak_resident_bytes'] >> 20:,}",
                    note,
                )
            )
    if encoder := result.get("encoder"):
        lines += [
            "",
            f"With the real encoder of `{encoder['pair']}`, {encoder['texts']} texts in "
            f"{encoder['shards']} shards: {encoder['seconds']:.1f} s, in "
            f"{encoder['encoder_share']:.1%} of which the encoder works (goal ≥ 95 %).",
        ]
    return [*lines, ""]


def _scale(results: Sequence[dict[str, Any]]) -> list[str]:
    lines = [
        "## Search at scale",
        "",
        "Written by `make bench-scale VECTORS=…`. Synthetic vectors as hard to search as those of "
        "medical questions and passages (`loadtest/bench/vectors.py`). *Alone*: one query a call "
        "on one thread, per second of processor time; *batch*: all queries in a call, on all "
        "threads, per second.",
        "",
        "![recall@10 against queries per second](scale.png)",
        "",
    ]
    for result in results:
        options = result["options"]
        name = f"scale-{options['vectors']}.json"
        lines += [
            f"### {options['vectors']:,} × {options['dimension']}",
            "",
            f"{options['queries']} queries, {options['threads']} threads, efConstruction "
            f"{options['construction']}; every point is in [{name}]({name}).",
            "",
            *_environment(result["environment"]),
            "",
            "| recall@10 ≥ | engine | parameters | reached | alone/s | p99 ms | batch/s | MB "
            "| build s |",
            "|---|---|---|---|---|---|---|---|---|",
            *(
                _default_row(target, entry)
                for target, ranked in result["defaults"].items()
                for entry in ranked
            ),
            "",
        ]
    return lines


def _environment(environment: dict[str, Any]) -> list[str]:
    hardware, commit = environment["hardware"], environment["commit"]
    changed = ", with changed files" if commit and commit["changed"] else ""
    return [
        f"- {environment['date']}, commit {commit['id'][:12] if commit else 'unknown'}{changed}",
        f"- {hardware['processors']} processors of {hardware['processor']}, "
        f"{hardware['memory_bytes'] / 2**30:.0f} GiB; load average before the run "
        f"{hardware['load_average'][0]:.1f}",
        "- " + ", ".join(f"{name} {number}" for name, number in environment["versions"].items()),
        *(
            f"- {name}: " + ", ".join(f"{n} {v}" for n, v in found.items())
            for name, found in environment["other_environments"].items()
        ),
    ]


def _figure_row(figure: dict[str, Any], command: str) -> str:
    unit = f" {figure['unit']}" if figure["unit"] else ""
    reached = figure["reached"]
    return _row(
        figure["name"],
        "not measured" if reached is None else f"{reached:.2f}{unit}",
        f"{_SIGNS[figure['relation']]} {figure['goal']:g}{unit}",
        "yes" if figure["met"] else "no",
        command,
        figure["note"],
    )


def _default_row(target: str, entry: dict[str, Any]) -> str:
    parameters = ", ".join(f"{name} {value}" for name, value in entry["parameters"].items())
    return _row(
        target,
        entry["engine"],
        parameters,
        f"{entry['recall']:.4f}",
        f"{entry['alone_per_second']:.0f}",
        f"{entry['alone_p99_ms']:.2f}",
        f"{entry['batch_per_second']:.0f}",
        f"{entry['bytes'] / 1e6:.0f}",
        f"{entry['build_seconds']:.0f}",
    )


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
