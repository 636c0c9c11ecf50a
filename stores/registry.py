"""Selection of vector stores by name or version, and of their index types."""

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from core.choices import SearchDevice
from core.errors import CareError, ProviderError
from stores.base import StoreName, VectorStore
from stores.faiss import factory as faiss_types
from stores.faiss.store import FaissStore
from stores.milvus import names as milvus_types
from stores.milvus.names import read_collection

if TYPE_CHECKING:
    from stores.milvus.store import MilvusStore


def default_factory(
    store: StoreName, count: int, dimension: int, different: int, crowded: int = 0
) -> str:
    """Returns the default index type of a store for `count` vectors of `different` texts.

    `crowded` of the vectors have too many copies for a graph of FAISS
    (`stores.recall.crowded_rows`).
    """
    if store == "milvus":
        return milvus_types.default_factory(count, different)
    return faiss_types.default_factory(count, dimension, different, crowded)


def default_factories(store: StoreName, count: int, dimension: int, different: int) -> set[str]:
    """Returns the default index types where it is not known how many vectors are crowded."""
    return {default_factory(store, count, dimension, different, most) for most in (0, count)}


def check_factory(store: StoreName, factory: str, dimension: int, count: int | None = None) -> None:
    """Checks an index type before a build; `count` is None if it is unknown.

    Raises:
        CareError: If the store does not support the type, or not for these vectors.
    """
    if store == "milvus":
        milvus_types.check_factory(factory)
    else:
        faiss_types.check_factory(factory, dimension, count)


@dataclass(frozen=True, slots=True)
class MilvusAddress:
    """Address and credentials of Milvus."""

    # As in http://host:19530; /database is appended for another database than the default one.
    uri: str
    # user:password or an API key, or "" without authentication.
    token: str = field(default="", repr=False)
    timeout: float = 20.0  # time-out of searches and small requests [s]


class VectorStores:
    """All available stores; the connection to Milvus is opened on first use.

    Args:
        milvus: Address of Milvus, or None if only files are used.
        device: Where FAISS searches: on the processor, or on a GPU in single or half precision.

    Raises:
        ProviderError: If FAISS cannot search on the device.
    """

    def __init__(self, milvus: MilvusAddress | None = None, device: SearchDevice = "cpu") -> None:
        self._address = milvus
        self._faiss = FaissStore(device)

    def get(self, name: StoreName) -> VectorStore:
        """Returns a store by name.

        Raises:
            CareError: If the address of Milvus is not set.
            ProviderError: If the client of Milvus is not installed.
            StoreError: If Milvus does not respond.
        """
        return self._faiss if name == "faiss" else self._milvus

    def for_version(self, folder: Path) -> VectorStore:
        """Returns the store of the version in `folder`; for errors see `get`."""
        return self._milvus if read_collection(folder) else self._faiss

    @cached_property
    def _milvus(self) -> "MilvusStore":
        if self._address is None:
            message = "the address of Milvus is not set: use --milvus-uri or CARE_MILVUS_URI"
            raise CareError(message, code="milvus_address_missing")
        try:
            from stores.milvus.store import MilvusStore
        except ModuleNotFoundError as error:
            message = "pymilvus is not installed: pip install 'care-retrieval[milvus]'"
            raise ProviderError(message, code="not_installed", package="pymilvus") from error
        return MilvusStore(self._address.uri, self._address.token, self._address.timeout)


# For commands without an address of Milvus.
FAISS_ONLY = VectorStores()
