"""`bench.json` and the table that is made from it."""

import json
from pathlib import Path
from typing import Any

JSON_NAME, TABLE_NAME = "bench.json", "README.md"

_SIGNS = {">=": "≥", "<=": "≤"}


def write(result: dict[str, Any], folder: Path) -> Path:
    """Writes both files; returns the path of the table."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(result, ensure_ascii=False, indent=1)
    (folder / JSON_NAME).write_text(text + "\n", encoding="utf-8")
    path = folder / TABLE_NAME
    path.write_text(table(result), encoding="utf-8")
    return path


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    hardware = result["environment"]["hardware"]
    commit = result["environment"]["commit"]
    changed = ", with changed files" if commit and commit["changed"] else ""
    versions = result["environment"]["versions"]
    lines = [
        "# Results",
        "",
        f"Written by `make bench`; every round is in [{JSON_NAME}]({JSON_NAME}).",
        "",
        f"- {result['environment']['date']}, commit "
        f"{commit['id'][:12] if commit else 'unknown'}{changed}",
        f"- {hardware['processors']} processors of {hardware['processor']}, "
        f"{hardware['memory_bytes'] / 2**30:.0f} GiB; the load comes from the same processors; "
        f"load average before the run {hardware['load_average'][0]:.1f}",
        "- " + ", ".join(f"{name} {number}" for name, number in versions.items()),
        *(
            f"- {name}: " + ", ".join(f"{n} {v}" for n, v in found.items())
            for name, found in result["environment"]["other_environments"].items()
        ),
        f"- index {result['options']['index']}, pair {result['options']['pair']}, "
        f"{result['options']['rounds']} alternating rounds of {result['options']['seconds']} s; "
        "medians",
        "",
        "| figure | reached | goal | met | command | what it is made of, what limits it |",
        "|---|---|---|---|---|---|",
    ]
    for name, scenario in result["scenarios"].items():
        command = f"`make bench ONLY={name}`"
        if "error" in scenario:
            first = scenario["error"].splitlines()[0]
            lines.append(_row(name, "not measured", "", "no", command, first))
        for figure in scenario.get("figures", []):
            lines.append(_figure_row(figure, command))
    return "\n".join(lines) + "\n"


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


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
