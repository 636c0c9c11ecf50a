"""Files of strangers: what they may not do to this machine, and what a user is told."""

import gzip
import io
import os
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Callable
from itertools import product
from pathlib import Path

import docx
import openpyxl
import pytest

from core.errors import CorpusError, ProviderError
from indexer import limits
from indexer.readers import formats, process
from indexer.readers.fields import FieldNames
from indexer.readers.process import ReaderProcess
from indexer.readers.source import UnreadableError
from tests.errors import raises
from tests.indexer.readers.reading import FILES, read

BOMB = """<?xml version="1.0"?><!DOCTYPE x [<!ENTITY a "aaaaaaaaaa">
<!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;&a;&a;">]>"""
FILE_ENTITY = '<?xml version="1.0"?><!DOCTYPE x [<!ENTITY a SYSTEM "file:///etc/passwd">]>'


def office(path: Path) -> Path:
    if path.suffix == ".docx":
        document = docx.Document()
        document.add_paragraph("多喝水")
        document.save(str(path))
    else:
        book = openpyxl.Workbook()
        book.active.append(["text"])
        book.active.append(["多喝水"])
        book.save(path)
    return path


def with_prolog(path: Path, part: str, prolog: str, encoding: str) -> None:
    """Puts a document type in front of a part of an Office document."""
    with zipfile.ZipFile(path) as package:
        parts = {name: package.read(name) for name in package.namelist()}
    root = parts[part].decode().partition("?>")[2]
    parts[part] = (prolog + root).encode(encoding)
    with zipfile.ZipFile(path, "w") as package:
        for name, content in parts.items():
            package.writestr(name, content)


@pytest.mark.parametrize(
    ("name", "part"), [("a.docx", "word/document.xml"), ("a.xlsx", "xl/worksheets/sheet1.xml")]
)
def test_office_documents_with_entities_are_refused(tmp_path: Path, name: str, part: str) -> None:
    assert read(office(tmp_path / name)).texts == ["多喝水"]
    for prolog, encoding in product((BOMB, FILE_ENTITY), ("utf-8", "utf-16")):
        path = office(tmp_path / f"hostile-{name}")
        with_prolog(path, part, prolog, encoding)
        with raises(CorpusError, "unsafe_file", path=path):
            read(path)


@pytest.mark.parametrize("name", ["a.docx", "a.xlsx", "a.zip"])
def test_what_is_no_package_is_an_error(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(b"no package")
    with raises(CorpusError, "unreadable", path=path):
        read(path)


@pytest.mark.parametrize("name", ["a.docx", "a.xlsx"])
def test_encrypted_and_old_office_documents_are_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(bytes.fromhex("d0cf11e0a1b11ae1") + bytes(1000))
    with raises(CorpusError, "encrypted", path=path):
        read(path)


@pytest.mark.parametrize("name", ["a.xls", "a.doc", "a.pptx", "a.jpg", "a.rar", "a.exe"])
def test_other_formats_are_named_with_what_to_do(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    with raises(CorpusError, "unsupported_format", path=tmp_path / name):
        read(tmp_path / name)


def zip_of(path: Path, **options: int) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("文件夹/甲.txt", "多喝水")
        archive.writestr("../out.txt", "出去")
        archive.writestr("/root.txt", "出去")
        archive.writestr("..\\win.txt", "出去")
        archive.writestr("inner.zip", b"PK")
        archive.writestr("a.exe", b"MZ")
        archive.writestr("bad.csv", b"a,b\n1,2\n")
        archive.writestr("empty.txt", b"")
        archive.writestr("__MACOSX/._a.txt", b"x")
        link = zipfile.ZipInfo("link.txt")
        link.external_attr = 0o120777 << 16
        archive.writestr(link, "/etc/passwd")
    return path


def test_what_leads_out_of_a_zip_archive_is_rejected(tmp_path: Path) -> None:
    path = zip_of(tmp_path / "a.zip")
    found = read(path)
    assert found.ids == ["a.zip/文件夹/甲.txt#1"]
    names = ("../out.txt", "/root.txt", "..\\win.txt", "inner.zip", "a.exe", "bad.csv", "link.txt")
    assert list(found.rejects) == [f"{path}/{name}" for name in names]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.zip"]


def test_names_of_a_zip_archive_may_be_in_gbk(tmp_path: Path) -> None:
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("ab.txt", "多喝水")
    content = path.read_bytes().replace(b"ab.txt", "药".encode("gbk") + b".txt")
    path.write_bytes(content)
    assert read(path).ids == ["a.zip/药.txt#1"]


@pytest.mark.parametrize("name", ["a.tar", "a.tar.gz", "a.tgz", "a.tar.xz"])
def test_what_leads_out_of_a_tar_archive_is_rejected(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    mode = {"tar": "w", "tgz": "w:gz"}.get(name.rpartition(".")[2], f"w:{name[-2:]}")
    with tarfile.open(path, mode) as archive:
        for member, content in (("甲.txt", "多喝水"), ("../out.txt", "出去")):
            facts = tarfile.TarInfo(member)
            facts.size = len(content.encode())
            archive.addfile(facts, io.BytesIO(content.encode()))
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE):
            facts = tarfile.TarInfo(f"{kind.decode()}.txt")
            facts.type, facts.linkname = kind, "/etc/passwd"
            archive.addfile(facts)
    found = read(path)
    assert found.ids == [f"{name}/甲.txt#1"]
    assert len(found.rejects) == 5


Limiter = Callable[[str, int], None]


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> Limiter:
    """Sets a limit in this process and in the child."""

    def limit(name: str, value: int) -> None:
        monkeypatch.setattr(limits, name, value)
        change = f"from indexer import limits; limits.{name} = {value};"
        command = process._COMMAND.replace("from indexer.readers", f"{change}from indexer.readers")
        monkeypatch.setattr(process, "_COMMAND", command)

    return limit


@pytest.mark.parametrize("name", ["a.zip", "a.tar.gz", "a.jsonl.gz", "a.docx"])
def test_what_unpacks_to_too_much_is_refused(tmp_path: Path, limited: Limiter, name: str) -> None:
    limited("MAX_UNPACKED_BYTES", 1 << 20)
    path, content = tmp_path / name, b"\n" * (2 << 20)
    if name.endswith(".tar.gz"):
        with tarfile.open(path, "w:gz") as archive:
            facts = tarfile.TarInfo("a.txt")
            facts.size = len(content)
            archive.addfile(facts, io.BytesIO(content))
    elif name.endswith(".jsonl.gz"):
        path.write_bytes(gzip.compress(b'{"content":"a"}\n' + content))
    else:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as package:
            package.writestr("a.txt", content)
    with raises(CorpusError, "file_too_large", path=path):
        read(path)


def test_an_archive_of_too_many_files_is_refused(tmp_path: Path, limited: Limiter) -> None:
    limited("MAX_MEMBERS", 3)
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for number in range(4):
            archive.writestr(f"{number}.txt", "甲")
    with raises(CorpusError, "too_many_files", path=path):
        read(path)


def test_a_file_that_needs_too_much_memory_is_refused(tmp_path: Path, limited: Limiter) -> None:
    limited("READER_MEMORY_BYTES", 1 << 30)
    path = tmp_path / "a.json"
    path.write_text("[" + "[]," * 20_000_000 + "[]]")
    with pytest.raises(CorpusError) as caught:
        read(path)
    assert caught.value.code in ("file_too_large", "unreadable")


def test_a_file_that_takes_too_long_is_stopped_and_the_next_one_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "b.txt").write_text("乙")
    # A reader that does not end, in the child.
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setattr(limits, "READER_SECONDS", 0.5)
    started = time.monotonic()
    with ReaderProcess() as child:
        with pytest.raises(UnreadableError) as caught:
            list(child.read(tmp_path / "pipe", "a.txt", FieldNames()))
        assert caught.value.code == "file_too_slow"
        monkeypatch.setattr(limits, "READER_SECONDS", 60.0)
        found = list(child.read(tmp_path / "b.txt", "b.txt", FieldNames()))
    assert found[-1][:2] == ("b.txt", 1)
    assert time.monotonic() - started < 30


@pytest.mark.parametrize("end", [100, 1000, -200])
@pytest.mark.parametrize("name", ["columns.pdf", "a.docx", "a.xlsx"])
def test_damaged_files_are_errors(tmp_path: Path, name: str, end: int) -> None:
    path = tmp_path / name
    whole = (FILES / name).read_bytes() if name.endswith("pdf") else office(path).read_bytes()
    path.write_bytes(whole[:end])
    try:
        assert read(path).documents  # PDF is repaired if its index at the end is lost
    except CorpusError as error:
        assert error.code in ("unreadable", "needs_ocr")
        assert error.fields["path"] == str(path)


def test_a_pdf_that_claims_a_gigabyte_or_too_many_pages_is_bounded(
    tmp_path: Path, limited: Limiter
) -> None:
    limited("MAX_PAGES", 2)
    with raises(CorpusError, "file_too_large"):
        read(FILES / "outline.pdf")
    path = tmp_path / "claim.pdf"
    path.write_bytes(
        b"%PDF-1.4\n1 0 obj<</Type/Catalog/Pages 2 0 R>>endobj\n"
        b"2 0 obj<</Type/Pages/Kids[3 0 R]/Count 1>>endobj\n"
        b"3 0 obj<</Type/Page/Parent 2 0 R/MediaBox[0 0 9 9]/Contents 4 0 R>>endobj\n"
        b"4 0 obj<</Length 1073741824>>stream\nBT ET\nendstream endobj\n"
        b"trailer<</Root 1 0 R>>\n"
    )
    with pytest.raises(CorpusError) as caught:
        read(path)
    assert caught.value.code in ("needs_ocr", "unreadable")


def test_nothing_is_imported_from_the_folder_of_the_files(tmp_path: Path) -> None:
    for module in ("json", "csv", "indexer", "openpyxl"):
        (tmp_path / f"{module}.py").write_text("open('imported', 'w')")
    (tmp_path / "a.txt").write_text("甲")
    script = "import sys; sys.path[:0] = [sys.argv[1]]\n"
    script += "from tests.indexer.readers.reading import read; print(read('a.txt').texts)"
    root = str(Path(__file__).parents[3])
    command = [sys.executable, "-P", "-c", script, root]
    found = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)
    assert found.stdout == "['甲']\n"
    assert not (tmp_path / "imported").exists()


def test_the_child_does_not_see_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    assert "secret" not in process._environment().values()


def test_a_library_that_is_not_installed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = "import sys;sys.modules['mammoth'] = None;"
    command = process._COMMAND.replace("from indexer", f"{block}from indexer")
    monkeypatch.setattr(process, "_COMMAND", command)
    path = office(tmp_path / "a.docx")
    with raises(ProviderError, "not_installed", path=path):
        read(path)
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.write(path, "a.docx")
    with raises(ProviderError, "not_installed", path=tmp_path / "a.zip"):
        read(tmp_path / "a.zip")


def test_every_format_has_a_reader() -> None:
    assert all(callable(format_.load()) for format_ in formats.FORMATS.values())
