"""From measured points to curves, and to the index that is fastest at a wanted recall."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TARGETS = (0.9, 0.95, 0.99)

_COLUMNS = {"alone_per_second": "one query a call, 1 thread", "batch_per_second": "batch"}


def frontier(points: Sequence[dict[str, Any]], speed: str) -> list[dict[str, Any]]:
    """Returns the points that no other beats in both recall and `speed`, by rising recall."""
    best: list[dict[str, Any]] = []
    for point in sorted(points, key=lambda p: (p["recall"], p[speed]), reverse=True):
        if not best or point[speed] > best[-1][speed]:
            best.append(point)
    return best[::-1]


def defaults(engines: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Returns for each wanted recall the engines that reach it, the fastest alone first.

    Each entry names the cheapest parameters that reach it, with speed, size [bytes] and
    build time [s].
    """
    found: dict[str, list[dict[str, Any]]] = {}
    for target in TARGETS:
        ranked = []
        for engine in engines:
            points = [point for point in engine["points"] if point["recall"] >= target]
            if points:
                best = max(points, key=lambda point: point["alone_per_second"])
                ranked.append(
                    {
                        "engine": engine["engine"],
                        **best,
                        "bytes": engine["bytes"],
                        "build_seconds": engine["build"]["seconds"],
                    }
                )
        found[str(target)] = sorted(ranked, key=lambda e: e["alone_per_second"], reverse=True)
    return found


def read_results(folder: Path) -> list[dict[str, Any]]:
    """Returns what the runs wrote into `folder`, the smallest first."""
    results = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("scale-*.json")]
    return sorted(results, key=lambda result: result["options"]["vectors"])


def plot(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Draws recall against queries per second: a row for each size, alone and in batches."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        len(results), 2, figsize=(13, 5 * len(results)), squeeze=False, layout="constrained"
    )
    kinds = list(dict.fromkeys(_kind(e["engine"]) for r in results for e in r["engines"]))
    for row, result in zip(axes, results, strict=True):
        for axis, (speed, title) in zip(row, _COLUMNS.items(), strict=True):
            for engine in result["engines"]:
                line = frontier(engine["points"], speed)
                axis.plot(
                    [point["recall"] for point in line],
                    [point[speed] for point in line],
                    marker="o",
                    markersize=3,
                    color=f"C{kinds.index(_kind(engine['engine']))}",
                    label=engine["engine"],
                )
            options = result["options"]
            if speed == "batch_per_second":
                title = f"{title}, {options['threads']} threads"
            axis.set_title(f"{options['vectors']:,} × {options['dimension']}: {title}")
            axis.set_yscale("log")
            axis.set_xlim(0.5, 1.005)
            axis.set_xlabel(f"recall@{result['k']}")
            axis.set_ylabel("queries per second")
            axis.grid(visible=True, which="both", alpha=0.3)
        row[0].legend(fontsize=8, loc="lower left")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _kind(name: str) -> str:
    """The number of inverted lists grows with the size; the colour stays."""
    return re.sub(r"IVF\d+", "IVF", name)
