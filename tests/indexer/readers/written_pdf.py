"""Writes PDF files with Chinese text, which need no font to be read."""

from collections.abc import Sequence
from pathlib import Path

# The left end, the baseline and the size of a line in points from the lower left corner, and its
# text.
Text = tuple[float, float, float, str]


def write_pdf(path: Path, pages: Sequence[Sequence[Text]]) -> Path:
    """Writes pages of A4; each character is as wide as it is high."""
    kids = b" ".join(b"%d 0 R" % (5 + 2 * number) for number in range(len(pages)))
    objects = [
        b"<</Type/Catalog/Pages 2 0 R>>",
        b"<</Type/Pages/Kids[%s]/Count %d>>" % (kids, len(pages)),
        b"<</Type/Font/Subtype/Type0/BaseFont/STSong-Light/Encoding/UniGB-UCS2-H"
        b"/DescendantFonts[4 0 R]>>",
        b"<</Type/Font/Subtype/CIDFontType0/BaseFont/STSong-Light/DW 1000"
        b"/CIDSystemInfo<</Registry(Adobe)/Ordering(GB1)/Supplement 2>>"
        b"/FontDescriptor<</Type/FontDescriptor/FontName/STSong-Light/Flags 4"
        b"/FontBBox[0 -120 1000 880]/Ascent 880/Descent -120/ItalicAngle 0/StemV 80>>>>",
    ]
    for number, texts in enumerate(pages):
        drawn = "\n".join(
            f"BT /F {size} Tf {x} {y} Td <{text.encode('utf-16-be').hex()}> Tj ET"
            for x, y, size, text in texts
        ).encode()
        objects += [
            b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 595 842]/Resources<</Font<</F 3 0 R>>>>"
            b"/Contents %d 0 R>>" % (6 + 2 * number),
            b"<</Length %d>>stream\n%s\nendstream" % (len(drawn), drawn),
        ]
    body = b"".join(b"%d 0 obj%s\nendobj\n" % (n, o) for n, o in enumerate(objects, start=1))
    path.write_bytes(b"%PDF-1.4\n" + body + b"trailer<</Root 1 0 R>>\n")
    return path
