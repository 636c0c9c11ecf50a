from tests.indexer.conftest import options, published

__all__ = ["options", "published"]
