"""Text of the image of a page (OCR), by the models of the extra `ocr`."""

import statistics
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from indexer.readers.layout import Line
from indexer.readers.source import UnreadableError

# The longer side of the image [pixels], at most so many for a point, and the shortest side that the
# models do not enlarge.
_SIDE, _MOST_SCALE, _LEAST_SIDE = 2000, 300 / 72, 736
# Pixels of an image of a page, which must be unpacked to draw it.
_MOST_PIXELS = 200_000_000
# Lines of nearly the usual height have the same size of letters.
_SAME_HEIGHT = 0.3


def recognize(page: Any) -> list[Line]:
    """Returns the pieces of text of a page of pypdfium2, in no order.

    ModuleNotFoundError if the extra `ocr` is not installed.
    """
    engine = _engine()
    for width, height in (image.get_px_size() for image in images(page)):
        if width * height > _MOST_PIXELS:
            most = f"{_MOST_PIXELS / 1e6:.0f} million pixels"
            raise UnreadableError(f"has an image of more than {most}: save it with fewer")
    try:
        scale = min(_MOST_SCALE, _SIDE / max(page.get_width(), page.get_height()))
        image = page.render(scale=scale).to_numpy()
        # Models would enlarge a narrow image to thousands of pixels.
        space = [(0, max(0, _LEAST_SIDE - side)) for side in image.shape[:2]]
        found = engine(np.pad(image, (*space, (0, 0)), constant_values=255))
    except Exception as error:  # libraries raise many
        detail = " ".join(str(error).split())[-200:]
        raise UnreadableError(f"cannot be recognized: {detail}") from error
    if not found.txts:
        return []
    height = page.get_height()
    lines = []
    for text, corners in zip(found.txts, found.boxes, strict=True):
        left, top = corners.min(axis=0) / scale
        right, bottom = corners.max(axis=0) / scale
        if shown := " ".join(text.split()):
            box = map(float, (left, height - bottom, right, height - top))
            lines.append(Line(shown, *box))
    _even(lines)
    return lines


def images(page: Any) -> Iterator[Any]:
    """Yields the images of a page of pypdfium2."""
    from pypdfium2.raw import FPDF_PAGEOBJ_IMAGE

    yield from page.get_objects(filter=[FPDF_PAGEOBJ_IMAGE], max_depth=2)


def _even(lines: list[Line]) -> None:
    """Gives lines of nearly the usual height that height: boxes are as high as their characters."""
    usual = statistics.median(line.height for line in lines) if lines else 0.0
    for line in lines:
        if abs(line.height - usual) < _SAME_HEIGHT * usual:
            middle = line.middle
            line.bottom, line.top = middle - usual / 2, middle + usual / 2


@cache
def _engine() -> Any:
    import rapidocr

    models = Path(rapidocr.__file__).parent / "models"
    # A path is given for each model: without one the library looks it up, and may download it.
    return rapidocr.RapidOCR(
        params={
            "Global.log_level": "critical",
            "Global.use_cls": False,  # whether a line is upside down
            "Det.model_path": str(models / "PP-OCRv6_det_small.onnx"),
            "Rec.model_path": str(models / "PP-OCRv6_rec_small.onnx"),
            # More threads wait by spinning, which takes the processors of others.
            "EngineConfig.onnxruntime.intra_op_num_threads": 1,
        }
    )
