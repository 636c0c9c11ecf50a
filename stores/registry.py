"""The stores of a command or service, by name and by version, and their index types."""

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from core.errors import CareError, ProviderError
from stores.base import StoreName, VectorStore
from stores.faiss import factory as faiss_types
from stores.faiss.store import FaissStore
from stores.milvus import names as milvus_types
from stores.milvus.names import read_collection

if TYPE_CHECKING:
    from stores.milvus.store import MilvusStore

STORES: tuple[StoreName, ...] = get_args(StoreName)


def default_factory(store: StoreName, count: int, dimension: int) -> str:
    """Returns the index type of a store for `count` vectors."""
    if store == "milvus":
        return milvus_types.default_factory(count)
    return faiss_types.default_factory(count, dimension)


def check_factory(store: StoreName, factory: str, dimension: int, count: int | None = None) -> None:
    """Checks an index type before any work is done; `count` is None while not known.

    Raises:
        CareError: If the store does not build such an index, or not of these vectors.
    """
    if store == "milvus":
        milvus_types.check_factory(factory)
    else:
        faiss_types.check_factory(factory, dimension, count)


@dataclass(frozen=True, slots=True)
class MilvusAddress:
    """Where Milvus is.

    Attributes:
        uri: http://host:19530, with /database where it is not the default one.
        token: What it asks for, user:password or an API key, or empty.
        timeout: The longest wait for an answer to a small request or a search [s].
    """

    uri: str
    token: str = field(default="", repr=False)
    timeout: float = 20.0


class VectorStores:
    """All stores that versions may keep their vectors in; Milvus is connected to on first use."""

    def __init__(self, milvus: MilvusAddress | None = None) -> None:
        self._address = milvus
        self._faiss = FaissStore()

    def get(self, name: StoreName) -> VectorStore:
        """Returns a store.

        Raises:
            CareError: If it is Milvus and its address is not known.
            ProviderError: If its client is not installed.
            StoreError: If it does not answer.
        """
        return self._faiss if name == "faiss" else self._milvus

    def of(self, folder: Path) -> VectorStore:
        """Returns the store of the version in `folder`; raises as `get` does."""
        return self._milvus if read_collection(folder) else self._faiss

    @cached_property
    def _milvus(self) -> "MilvusStore":
        if self._address is None:
            message = "vectors in Milvus need its address: --milvus-uri, or CARE_MILVUS_URI"
            raise CareError(message, code="milvus_address_missing")
        try:
            from stores.milvus.store import MilvusStore
        except ModuleNotFoundError as error:
            message = "vectors in Milvus need pymilvus: pip install 'care-retrieval[distributed]'"
            raise ProviderError(message, code="not_installed", package="pymilvus") from error
        return MilvusStore(self._address.uri, self._address.token, self._address.timeout)


# The stores of a command that is not told of Milvus.
FILES = VectorStores()
