"""Tables in Parquet and Arrow files."""

from collections.abc import Iterable, Iterator

import pyarrow as pa
import pyarrow.parquet as pq

from indexer.readers.source import Item, Report, Source
from indexer.readers.tables import table_items

_BATCH_ROWS = 64


def read_parquet(source: Source) -> Iterator[Item]:
    """Reads Parquet whose columns have other names than those of a corpus."""
    file = pq.ParquetFile(source.stream)
    batches = file.iter_batches(batch_size=_BATCH_ROWS)
    yield from _batches(source, file.schema_arrow, batches, "Parquet")


def read_arrow(source: Source) -> Iterator[Item]:
    """Reads a file of a data set that `save_to_disk` wrote: an Arrow stream or file."""
    try:
        stream = pa.ipc.open_stream(source.stream)
        yield from _batches(source, stream.schema, stream, "Arrow")
    except pa.ArrowInvalid:
        source.stream.seek(0)
        file = pa.ipc.open_file(source.stream)
        batches = map(file.get_batch, range(file.num_record_batches))
        yield from _batches(source, file.schema, batches, "Arrow")


def _batches(
    source: Source, schema: pa.Schema, batches: Iterable[pa.RecordBatch], format_: str
) -> Iterator[Item]:
    rows = (
        row
        for batch in batches
        for start in range(0, len(batch), _BATCH_ROWS)
        for row in batch.slice(start, _BATCH_ROWS).to_pylist(maps_as_pydicts="lossy")
    )
    yield from table_items(
        source, list(schema.names), enumerate(rows, start=1), Report(source.name, format_)
    )
