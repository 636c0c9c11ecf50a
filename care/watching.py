"""An index that follows a folder of documents."""

from collections.abc import Iterator
from pathlib import Path

from care.indexing import active_settings, encoder_options
from care.options import IndexOptions
from core.errors import CareError
from indexer.live.folder import FolderChange, LiveFolder
from indexer.live.index import LiveIndex
from indexer.update import check_encoding
from models.encoders.factory import document_encoder

# Options that change an index itself.
_OF_INDEX: tuple[str, ...] = ("factory", "store", "recall", "queries", "full_text", "terms")
_OF_INDEX += ("lexical_weight", "token_vectors", "chunk_tokens")


def watch_folder(name: str, folder: Path, options: IndexOptions) -> Iterator[FolderChange]:
    """Lets an index follow a folder; see `LiveFolder`.

    Returns:
        What has changed, whenever it has, for ever.
    """
    for option in _OF_INDEX:
        if getattr(options, option) is not None:
            flag = f"--{option.replace('_', '-')}"
            message = f"{flag} excludes --watch: run care update with it first"
            raise CareError(message, code="option_not_taken", option=flag)
    base, pair, chosen, settings = active_settings(name, options, str(folder), progress=False)
    check_encoding(base, pair.document, settings)
    encoder = document_encoder(pair, encoder_options(chosen, settings.token_vectors))
    live = LiveIndex(settings.index, encoder, batch_size=settings.batch_size)
    chunked = base.chunking is not None
    return LiveFolder(live, settings.index, folder, settings.reading, chunked=chunked).watch()
