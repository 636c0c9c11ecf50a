"""Plots of scores; labels may be Chinese."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

import matplotlib
from matplotlib import font_manager
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from core.files import atomic
from evaluation.statistics import Interval

# In order of preference; each contains the simplified characters.
FONTS = (
    "Noto Sans CJK SC",
    "Noto Sans CJK JP",  # a file with all CJK variants; matplotlib lists it by its first name
    "Noto Sans SC",
    "Source Han Sans SC",
    "WenQuanYi Micro Hei",
    "WenQuanYi Zen Hei",
    "PingFang SC",
    "Microsoft YaHei",
    "SimHei",
)
_WIDTH, _HEIGHT = 7.2, 4.4

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SystemPoint:
    """A system in the accuracy–speed plot."""

    name: str
    queries_per_second: float  # of its query side
    accuracy: Interval  # nDCG@10
    asymmetric: bool  # whether query and document side are different models
    document_bytes: int | None  # of the document encoder's weights; None if it has none


def chinese_font() -> str | None:
    """Returns the family of an installed font with Chinese characters, or None."""
    manager = font_manager.fontManager
    # Fonts may have been installed after matplotlib built its list.
    for path in set(font_manager.findSystemFonts()) - {font.fname for font in manager.ttflist}:
        with suppress(RuntimeError, OSError):
            manager.addfont(path)
    families = {font.name for font in manager.ttflist}
    return next((name for name in FONTS if name in families), None)


@contextmanager
def _style() -> Iterator[None]:
    font = chinese_font()
    if font is None:
        logger.warning(
            "no font with Chinese characters is installed; labels show boxes. "
            "On Debian and Ubuntu: apt-get install fonts-noto-cjk"
        )
    families = [font, "DejaVu Sans"] if font else ["DejaVu Sans"]
    with matplotlib.rc_context(
        {
            "font.family": families,
            "axes.unicode_minus": False,
            "axes.grid": True,
            "grid.alpha": 0.3,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "svg.hashsalt": "care",
        }
    ):
        yield


def draw_tradeoff(points: Sequence[SystemPoint], folder: Path) -> None:
    """Writes `tradeoff_figure` as `tradeoff.png` and `.svg`."""
    folder.mkdir(parents=True, exist_ok=True)
    with _style():
        figure = tradeoff_figure(points)
        for kind in ("png", "svg"):
            with atomic(folder / f"tradeoff.{kind}") as temporary:
                figure.savefig(temporary, format=kind, dpi=150, metadata={})


def tradeoff_figure(points: Sequence[SystemPoint]) -> Figure:
    """Plots nDCG@10 against queries/s, and against the size of the document encoder.

    The second panel is omitted if fewer than two systems have a document encoder.
    """
    sized = [(p, p.document_bytes / 1e6) for p in points if p.document_bytes]
    panels = 2 if len(sized) > 1 else 1
    figure = Figure(figsize=(panels * _WIDTH, _HEIGHT), layout="constrained")
    left, *right = figure.subplots(1, panels, squeeze=False)[0]
    _scatter(left, [(p, p.queries_per_second) for p in points])
    left.set_xlabel("查询编码 queries/s（对数轴）")
    left.set_title("准确率与查询速度 · accuracy against speed")
    for axes in right:
        _scatter(axes, sized)
        for asymmetric, style in ((False, "--"), (True, "-")):
            line = sorted((x, p.accuracy.value) for p, x in sized if p.asymmetric == asymmetric)
            if len(line) > 1:
                axes.plot(*zip(*line, strict=True), style, color="grey", lw=0.8)
        axes.set_xlabel("文档编码器权重 document encoder's weights [MB]")
        axes.set_title("对称与非对称 · symmetric ○ and asymmetric ●")
    return figure


def _scatter(axes: Axes, points: Sequence[tuple[SystemPoint, float]]) -> None:
    axes.set_xscale("log")
    axes.set_ylabel("nDCG@10")
    order = sorted(x for _, x in points)
    for point, x in points:
        value = point.accuracy
        face = None if point.asymmetric else "white"
        (mark,) = axes.plot(x, value.value, "o", mfc=face, ms=7, mew=1.5)
        axes.vlines(x, value.low, value.high, color=mark.get_color(), lw=1)
        # Alternately above and below, so that labels of neighbours do not overlap.
        place = (7, -12 if order.index(x) % 2 else 4)
        axes.annotate(
            point.name, (x, value.value), xytext=place, textcoords="offset points", fontsize=8
        )
    axes.margins(x=0.25, y=0.15)


def score_bars(scores: Mapping[str, Interval], title: str) -> str:
    """Returns a bar chart of scores with their intervals, as an SVG element."""
    with _style():
        figure = Figure(figsize=(_WIDTH, 0.6 + 0.35 * len(scores)), layout="constrained")
        axes = figure.subplots()
        names = list(scores)[::-1]
        values = [100 * scores[name].value for name in names]
        errors = [
            [100 * (scores[n].value - scores[n].low) for n in names],
            [100 * (scores[n].high - scores[n].value) for n in names],
        ]
        axes.barh(names, values, xerr=errors, color="#7aa6c2", height=0.6, ecolor="#333")
        axes.set_title(title, fontsize=10)
        out = StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
    svg = out.getvalue()
    return svg[svg.index("<svg") :]
