"""Losses and measures over steps, as a picture."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

_LOSS, _MEASURE = "loss", "dev_nDCG@10"
_ASIDE = {"step", "epoch", "grad_norm", "learning_rate"}


def draw(history: Sequence[dict[str, float]], title: str, path: Path) -> None:
    """Draws the loss with its parts, and nDCG@10 on the dev questions if it was measured.

    Args:
        history: Records with `step` and whatever was logged there.
        title: The stage.
        path: The PNG file.
    """
    losses = [name for entry in history if _LOSS in entry for name in entry]
    names = [name for name in dict.fromkeys(losses) if name not in _ASIDE]
    panels = [names, *([[_MEASURE]] if any(_MEASURE in entry for entry in history) else [])]
    figure = Figure(figsize=(5 * len(panels), 3.5), layout="constrained")
    for axes, shown in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for name in shown:
            points = [(entry["step"], entry[name]) for entry in history if name in entry]
            axes.plot(*zip(*points, strict=True), marker=".", label=name)
        axes.set_xlabel("step")
        axes.legend()
        axes.grid(alpha=0.3)
    figure.suptitle(title)
    figure.savefig(path, dpi=100)
