"""Pages without text, whose images are read by OCR."""

import difflib
import zlib
from pathlib import Path

import pypdfium2
import pytest

from core.errors import ProviderError
from indexer import limits
from indexer.readers import process
from indexer.readers.fields import FieldNames
from indexer.readers.process import ReaderProcess
from indexer.readers.source import UnreadableError
from tests.errors import raises
from tests.indexer.readers.reading import FILES, Found, read
from tests.indexer.readers.test_documents import GUIDE


def scan(source: Path, path: Path) -> Path:
    """Writes a PDF whose pages are images of those of another one, with 150 points an inch."""
    scanned = pypdfium2.PdfDocument.new()
    for page in pypdfium2.PdfDocument(source):
        size = page.get_size()
        image = pypdfium2.PdfImage.new(scanned)
        image.set_bitmap(page.render(scale=150 / 72))
        image.set_matrix(pypdfium2.PdfMatrix().scale(*size))
        copy = scanned.new_page(*size)
        copy.insert_obj(image)
        copy.gen_content()
    scanned.save(path)
    return path


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return read(scan(FILES / "outline.pdf", tmp_path_factory.mktemp("scan") / "g.pdf"), ocr=True)


def test_scanned_pages_give_their_text_without_headers(found: Found) -> None:
    assert not found.rejects
    expected = "".join(f"{title}{text}" for _, title, text in GUIDE)
    text = "".join(f"{document.title}{document.text}" for document in found.documents)
    blocks = difflib.SequenceMatcher(None, expected, text, autojunk=False).get_matching_blocks()
    assert sum(block.size for block in blocks) > 0.97 * len(expected)
    assert "某某医院" not in text and "共3页" not in text.replace(" ", "")


def test_scanned_pages_have_titles_tables_and_numbers(found: Found) -> None:
    assert found.titles == [title for _, title, _ in GUIDE]
    assert "药名 | 剂量\n氨氯地平 | 5 mg" in found.texts[0]
    facts = [document.metadata for document in found.documents]
    assert [fact["page"] for fact in facts] == [1, 1, 2, 2, 3, 3]
    assert all(fact["ocr"] is True for fact in facts)


@pytest.fixture
def without_ocr(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child in which the extra is not installed."""
    block = "import sys;sys.modules['rapidocr'] = None;"
    command = process._COMMAND.replace("from indexer", f"{block}from indexer")
    monkeypatch.setattr(process, "_COMMAND", command)


@pytest.mark.usefixtures("without_ocr")
def test_the_missing_extra_is_named_and_pages_with_text_do_not_need_it() -> None:
    with raises(ProviderError, "not_installed", path=FILES / "scan.pdf") as caught:
        read(FILES / "scan.pdf", ocr=True)
    assert "[files,ocr]" in str(caught.value)
    found = read(FILES / "columns.pdf", ocr=True)
    assert found.documents == read(FILES / "columns.pdf").documents
    assert "ocr" not in found.documents[0].metadata


def image_pdf(path: Path, page: tuple[int, int], image: tuple[int, int]) -> Path:
    """Writes a PDF with a page of black pixels."""
    width, height = image
    # Each block of zeros is the same few bytes.
    packer = zlib.compressobj(9)
    rows = bytes(width * 3 * 100)
    data = b"".join(packer.compress(rows) for _ in range(height // 100)) + packer.flush()
    drawn = b"q %d 0 0 %d 0 0 cm /I Do Q" % page
    objects = (
        b"<</Type/Catalog/Pages 2 0 R>>",
        b"<</Type/Pages/Kids[3 0 R]/Count 1>>",
        b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 %d %d]/Contents 4 0 R" % page
        + b"/Resources<</XObject<</I 5 0 R>>>>>>",
        b"<</Length %d>>stream\n%s\nendstream" % (len(drawn), drawn),
        b"<</Type/XObject/Subtype/Image/ColorSpace/DeviceRGB/BitsPerComponent 8"
        b"/Filter/FlateDecode/Width %d/Height %d/Length %d>>stream\n%s\nendstream"
        % (width, height, len(data), data),
    )
    body = b"".join(b"%d 0 obj%s\nendobj\n" % (n, o) for n, o in enumerate(objects, start=1))
    path.write_bytes(b"%PDF-1.4\n" + body + b"trailer<</Root 1 0 R>>\n")
    return path


def test_a_huge_image_is_rejected_and_a_narrow_page_is_bounded(tmp_path: Path) -> None:
    image_pdf(tmp_path / "huge.pdf", (600, 800), (10_000, 30_000))
    image_pdf(tmp_path / "narrow.pdf", (14_400, 20), (3000, 100))
    (tmp_path / "text.txt").write_text("多喝水")
    found = read(tmp_path, ocr=True)
    assert found.texts == ["多喝水"]
    assert list(found.rejects) == [f"{tmp_path / 'huge.pdf'} page 1", str(tmp_path / "narrow.pdf")]


CHILD = """
import sys
sys.stdin.readline()
print('{"more_time": true}', flush=True)
if sys.argv[1] == "wait":
    sys.stdin.readline()
print('{"end": true}', flush=True)
"""


def test_a_recognized_page_adds_its_time_up_to_the_limit_of_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.pdf").touch()

    def read_with(seconds: float, argument: str) -> None:
        monkeypatch.setattr(limits, "READER_SECONDS_PER_OCR_PAGE", seconds)
        monkeypatch.setattr(process, "_COMMAND", CHILD.replace("sys.argv[1]", repr(argument)))
        with ReaderProcess() as child:
            assert list(child.read(tmp_path / "a.pdf", "a.pdf", FieldNames(), ocr=True)) == []

    with pytest.raises(UnreadableError) as caught:
        read_with(-limits.READER_SECONDS, "wait")
    assert caught.value.code == "file_too_slow"
    read_with(0, "end")
    monkeypatch.setattr(limits, "MAX_PAGES", 0)
    read_with(-limits.READER_SECONDS, "end")
