import logging
import warnings
from collections.abc import Iterator
from pathlib import Path

import matplotlib
import pytest
from matplotlib import font_manager

from evaluation import plots
from evaluation.plots import (
    SystemPoint,
    chinese_font,
    draw_tradeoff,
    score_bars,
    tradeoff_figure,
)
from evaluation.statistics import Interval

POINTS = [
    SystemPoint("对称一", 100.0, Interval(0.5, 0.4, 0.6), False, 10_000_000),
    SystemPoint("对称二", 30.0, Interval(0.6, 0.5, 0.7), False, 40_000_000),
    SystemPoint("非对称", 300.0, Interval(0.6, 0.5, 0.7), True, 40_000_000),
    SystemPoint("bm25", 900.0, Interval(0.3, 0.2, 0.4), False, None),
]


@pytest.fixture(autouse=True)
def _without_warnings_of_glyphs() -> Iterator[None]:
    with warnings.catch_warnings():
        if not chinese_font():
            warnings.simplefilter("ignore")
        else:
            warnings.simplefilter("error")
        yield


def test_labels_are_drawn_or_the_missing_font_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        draw_tradeoff(POINTS, tmp_path)
    files = sorted(tmp_path.iterdir())
    assert [path.name for path in files] == ["tradeoff.png", "tradeoff.svg"]
    assert all(path.stat().st_size > 10_000 for path in files)
    assert bool(caplog.records) == (chinese_font() is None)


def test_each_kind_of_pair_has_a_line_over_the_size() -> None:
    large = SystemPoint("非对称二", 300.0, Interval(0.7, 0.6, 0.8), True, 80_000_000)
    left, right = tradeoff_figure([large, *POINTS]).axes
    assert left.get_xscale() == right.get_xscale() == "log"
    assert sorted(line.get_xdata()[0] for line in left.lines) == [30, 100, 300, 300, 900]
    lines = {
        line.get_linestyle(): line.get_xydata().tolist()
        for line in right.lines
        if line.get_marker() != "o"
    }
    assert lines == {"--": [[10, 0.5], [40, 0.6]], "-": [[40, 0.6], [80, 0.7]]}
    filled = [
        line.get_markerfacecolor() != "white" for line in right.lines if line.get_marker() == "o"
    ]
    assert filled == [True, False, False, True]


@pytest.mark.parametrize("count", [1, 2])
def test_one_document_encoder_or_none_has_no_panel_of_sizes(count: int) -> None:
    (axes,) = tradeoff_figure(POINTS[-count:]).axes
    assert len(axes.lines) == count


def test_one_model_of_a_kind_has_no_line() -> None:
    _, right = tradeoff_figure(POINTS).axes
    assert [line.get_linestyle() for line in right.lines if line.get_marker() != "o"] == ["--"]


def test_without_a_font_the_package_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(plots, "FONTS", ("No Such Font",))
    assert score_bars({"x": Interval(0.5, 0.4, 0.6)}, "Retrieval").startswith("<svg")
    assert "fonts-noto-cjk" in caplog.text


def test_a_font_installed_since_the_cache_was_made_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stale = [font for font in font_manager.fontManager.ttflist if "DejaVu Sans" not in font.name]
    monkeypatch.setattr(font_manager.fontManager, "ttflist", stale)
    monkeypatch.setattr(plots, "FONTS", ("DejaVu Sans",))
    path = str(Path(matplotlib.get_data_path(), "fonts", "ttf", "DejaVuSans.ttf"))
    monkeypatch.setattr(font_manager, "findSystemFonts", lambda: [path])
    assert chinese_font() == "DejaVu Sans"
