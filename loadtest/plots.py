"""Figures of what was measured."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from loadtest.measurement import Measurement

_QUANTILES = ("p50", "p90", "p99")


def plot_latency(
    measurements: Sequence[Measurement], path: Path, bound_ms: float | None, capacity: float | None
) -> None:
    """Draws latency against arrival rate as a PNG.

    Each measurement is a dot, hollow where the driver fell behind; the lines join the last full
    dot of each rate.

    Args:
        measurements: In any order.
        path: The file.
        bound_ms: The bound on p99, if there was one [ms].
        capacity: The highest rate within it, if that was sought and found [requests/s].
    """
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    answered = sorted((m for m in measurements if m.latency_ms), key=lambda m: m.rate)
    kept = [m for m in answered if m.kept_schedule]
    behind = [m for m in answered if not m.kept_schedule]
    line = {m.rate: m for m in kept}.values()
    for color, name in enumerate(_QUANTILES):

        def draw(some: Iterable[Measurement], name: str = name, **style: Any) -> None:
            axes.plot([m.rate for m in some], [m.latency_ms[name] for m in some], **style)

        draw(line, color=f"C{color}", label=name)
        draw(kept, color=f"C{color}", marker="o", linestyle="")
        draw(behind, color=f"C{color}", marker="o", linestyle="", markerfacecolor="none")
    if behind:
        axes.plot([], [], "o", color="grey", markerfacecolor="none", label="driver behind")
    if bound_ms is not None:
        axes.axhline(bound_ms, color="grey", linestyle=":", label=f"bound {bound_ms:g} ms")
    if capacity is not None:
        axes.axvline(capacity, color="grey", linestyle="--", label=f"highest {capacity:g} /s")
    axes.set(xlabel="requests per second, due", ylabel="latency [ms]")
    if answered:
        axes.set(xscale="log", yscale="log")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.set_major_formatter("{x:g}")
            axis.set_minor_locator(NullLocator())
    else:
        axes.set_title("no request was answered")
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(path, dpi=150)
