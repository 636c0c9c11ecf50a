"""Limits of a record of a corpus, and of all records of an index.

A record beyond a limit is a reject with file, line and reason; an index beyond a limit is an error.
Real corpora are far below them: they bound what one record can cost a build, and what a field can
cost each request that lists or filters it.
"""

from core.records import MAX_LINE_BYTES

# One line of JSONL or one row of Parquet, in memory. Longer lines are skipped piece by piece.
MAX_RECORD_BYTES = MAX_LINE_BYTES

MAX_ID_CHARS = 512
# Titles are encoded in front of the text; encoders read 512 to some thousands of tokens.
MAX_TITLE_CHARS = 4_000
MAX_TEXT_CHARS = 100_000
MAX_CHUNKED_TEXT_CHARS = 1_000_000

# Every hit returns its metadata, and every chunk of a document repeats them.
MAX_METADATA_BYTES = 64 * 1024
MAX_METADATA_DEPTH = 32
MAX_FIELDS = 100
MAX_FIELD_NAME_CHARS = 128
# Each value of a list is one entry of the filters.
MAX_LIST_VALUES = 1_000
MAX_VALUE_CHARS = 8_000

# Different names of metadata fields in an index. The service lists them, and data that are used as
# names (a field per patient) would make as many filters.
MAX_INDEX_FIELDS = 1_000


def max_text_chars(*, chunked: bool) -> int:
    """Returns the maximum length of a text [characters], with and without chunking."""
    return MAX_CHUNKED_TEXT_CHARS if chunked else MAX_TEXT_CHARS


# What the child process that reads ordinary files may use, for one file: memory, seconds, and
# seconds more for each MiB of it and each page whose text is recognized.
READER_MEMORY_BYTES = 3 << 30
READER_SECONDS = 120.0
READER_SECONDS_PER_MIB = 2.0
READER_SECONDS_PER_OCR_PAGE = 60.0
# A document that is read as a whole: text, HTML, Markdown.
MAX_DOCUMENT_BYTES = 64 << 20
# Pages of a PDF.
MAX_PAGES = 20_000
# Files of an archive or an Office document, and their size when unpacked.
MAX_MEMBERS = 10_000
MAX_UNPACKED_BYTES = 4 << 30
# Columns of a table.
MAX_COLUMNS = 1_000
