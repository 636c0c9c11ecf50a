import logging
import warnings
from pathlib import Path
from typing import Any

import matplotlib
import pytest
from matplotlib import font_manager

from models.evaluation import plots
from models.evaluation.plots import SystemPoint, chinese_font, draw_tradeoff, score_bars
from models.evaluation.statistics import Interval

POINTS = [
    SystemPoint("对称一", 100.0, Interval(0.5, 0.4, 0.6), False, 10_000_000),
    SystemPoint("对称二", 30.0, Interval(0.6, 0.5, 0.7), False, 40_000_000),
    SystemPoint("非对称", 300.0, Interval(0.6, 0.5, 0.7), True, 40_000_000),
    SystemPoint("bm25", 900.0, Interval(0.3, 0.2, 0.4), False, None),
]


def test_labels_are_drawn_or_the_missing_font_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with warnings.catch_warnings(), caplog.at_level(logging.WARNING):
        if chinese_font():
            warnings.simplefilter("error")
        files = draw_tradeoff(POINTS, tmp_path)
    assert [path.name for path in files] == ["tradeoff.png", "tradeoff.svg"]
    assert all(path.stat().st_size > 10_000 for path in files)
    assert bool(caplog.records) == (chinese_font() is None)


def test_each_kind_is_a_line_as_the_document_encoder_grows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(plots, "_save", lambda figure, *_: drawn.append(figure))
    large = SystemPoint("非对称二", 300.0, Interval(0.7, 0.6, 0.8), True, 80_000_000)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        draw_tradeoff([large, *POINTS], tmp_path)
    left, right = drawn[0].axes
    assert left.get_xscale() == right.get_xscale() == "log"
    assert sorted(line.get_xdata()[0] for line in left.lines) == [30, 100, 300, 300, 900]
    lines = {
        line.get_linestyle(): line.get_xydata().tolist()
        for line in right.lines
        if len(line.get_xydata()) > 1
    }
    assert lines == {"--": [[10, 0.5], [40, 0.6]], "-": [[40, 0.6], [80, 0.7]]}
    filled = [
        line.get_markerfacecolor() != "white" for line in right.lines if line.get_marker() == "o"
    ]
    assert filled == [True, False, False, True]


def test_the_picture_of_a_system_without_an_encoder(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert len(draw_tradeoff(POINTS[-1:], tmp_path)) == 2


def test_without_a_font_the_package_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(plots, "FONTS", ("No Such Font",))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert score_bars({"x": Interval(0.5, 0.4, 0.6)}, "Retrieval").startswith("<svg")
    assert "apt-get install fonts-noto-cjk" in caplog.text


def test_a_font_installed_since_the_cache_was_made_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stale = [font for font in font_manager.fontManager.ttflist if "DejaVu Sans" not in font.name]
    monkeypatch.setattr(font_manager.fontManager, "ttflist", stale)
    monkeypatch.setattr(plots, "FONTS", ("DejaVu Sans",))
    path = str(Path(matplotlib.get_data_path(), "fonts", "ttf", "DejaVuSans.ttf"))
    monkeypatch.setattr(font_manager, "findSystemFonts", lambda: [path])
    assert chinese_font() == "DejaVu Sans"
